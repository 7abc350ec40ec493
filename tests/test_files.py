"Files: killed at each step of writing, every byte changed, cut anywhere, a full disk, archives and downloads that lie."
import io, itertools, json, os, signal, subprocess, sys, tarfile, traceback, warnings, zipfile
from pathlib import Path
import pytest, torch
from bench.pack import pack
from fedlit.ground import files
from fedlit.data import load
from fedlit.engine.inputs import writable
from fedlit.ground.files import (Damaged, fetch, forget, last, newest, read_json, read_tensors, result, unpack,
                                 write_file, write_json, write_tensors)
from fedlit.methods import FedAvgM, MOON
from fedlit.models import build
from fedlit.partition import iid
from fedlit.local import Local
from fedlit.result import FORMAT, Run
from fedlit.run import federate

TASK = load('digits').subset(120, test=40)
CLIENTS = iid(TASK.y_train, 4, seed=0)
CLOCK = ['seconds', 'peak_mb']
needs_fork = pytest.mark.skipif(not hasattr(os, 'fork') or sys.platform == 'darwin', reason='kills forked processes')
needs_links = pytest.mark.skipif(os.name == 'nt', reason='symbolic links need a privilege on Windows')

def go(rounds, checkpoint=None):
    net = build('mlp', TASK, seed=0, hidden=(8,), features=8)
    return federate(net, TASK, CLIENTS, FedAvgM() + MOON(), rounds, Local(batch_size=32), .5, checkpoint=checkpoint,
                    progress=False)

def content(path):
    "All that a checkpoint holds but the time that it took."
    about, tensors = read_tensors(path, FORMAT)
    rows = [{k: v for k, v in row.items() if k not in CLOCK} for row in about.pop('history')]
    return about, rows, {k: v.tolist() for k, v in tensors.items()}

def parts(folder): return [f.name for f in folder.iterdir() if f.name.endswith('.part')]

# ---- killed ----

def forked(work):
    "Do `work` in a process of its own, whose memory and clock begin here; how that ended."
    if pid := os.fork(): return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)

STEP = [lambda half: None] # what a doomed process does before each step

class Counted(io.FileIO):
    "A file of which half a piece is written when its process is killed."
    def write(self, data):
        STEP[0](lambda: io.FileIO.write(self, bytes(data)[:len(data)//2]))
        return super().write(data)

def killed_at(n, work):
    "Do `work`, killed at its `n`-th write, sync or rename; True where it was not that long."
    def doomed():
        count, fsync, replace = itertools.count(1), os.fsync, os.replace
        def step(half=lambda: None):
            if next(count) == n:
                half()
                os.kill(os.getpid(), signal.SIGKILL)
        STEP[0], files.open = step, Counted
        os.fsync = lambda f: (step(), fsync(f))
        os.replace = lambda a, b: (step(), replace(a, b))
        work()
    end = forked(doomed)
    assert end in (0, -signal.SIGKILL), end
    return end == 0

@pytest.mark.slow
@needs_fork
@pytest.mark.parametrize('pause', [0, 1e12], ids=['always synced', 'synced once'])
def test_a_run_killed_at_every_step_of_writing_ends_as_if_never_stopped(tmp_path, monkeypatch, calm, pause):
    monkeypatch.setattr(files, 'PAUSE', pause)
    for n in range(1, 100):
        file = tmp_path/str(n)/'c.safetensors'
        if killed_at(n, lambda: go(3, file)): break
        assert forked(lambda: go(3, file)) == 0 and content(file) == content(calm), n
    assert n > (18 if pause == 0 else 12), n     # writes, syncs and renames of three checkpoints

@needs_fork
@pytest.mark.parametrize('keep', [False, True])
def test_a_reader_finds_the_old_or_the_new_whenever_the_writer_is_killed(tmp_path, keep):
    old, new = ({'a': torch.full((9,), v)} for v in (1., 2.))
    seen = []
    for n in range(1, 20):
        file, told = tmp_path/str(n)/'t', tmp_path/str(n)/'r.json'
        write_tensors(file, old, dict(format=1))
        write_json(told, dict(v=1.))
        if killed_at(n, lambda: (write_tensors(file, new, dict(format=1), keep), write_json(told, dict(v=2.)))): break
        seen.append((newest(file, lambda p: read_tensors(p, 1)[1]['a'][0].item()), read_json(told)['v']))
    assert seen == sorted(seen) and set(seen) == {(1., 1.), (2., 1.), (2., 2.)} and n >= 10 # never neither, never mixed

# ---- changed ----

def refused(path, read, raw):
    "Is `path` refused once it holds `raw`, by an error that names it?"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=path.name): read(path)

@pytest.mark.slow
def test_every_changed_byte_of_a_checkpoint_is_refused(tmp_path, calm):
    raw, path = bytearray(calm.read_bytes()), tmp_path/'c.safetensors'
    header = 8 + int.from_bytes(raw[:8], 'little')
    for i in [*range(header), *range(header, len(raw), max(1, (len(raw)-header)//300))]:
        raw[i] ^= (wrong := 1 << i % 8)
        refused(path, lambda p: read_tensors(p, FORMAT), raw)
        raw[i] ^= wrong
    path.write_bytes(raw)
    assert content(path) == content(calm)

def test_every_changed_bit_of_a_result_is_refused_or_changes_nothing(tmp_path):
    path, said = tmp_path/'r.json', dict(method='FedAvg()', accuracy=[.5, 1e-7, None], rounds=3)
    raw, harmless = bytearray(write_json(path, said).read_bytes()), set()
    for i in range(len(raw)):
        for bit in range(8):
            raw[i] ^= 1 << bit
            path.write_bytes(raw)
            try:
                assert read_json(path) == said
                harmless.add((chr(raw[i] ^ 1 << bit), chr(raw[i])))
            except ValueError as e: assert 'r.json' in str(e)
            raw[i] ^= 1 << bit
    # white space, 1e-7 as 1E-7, and an older number of the format
    assert {a for a, _ in harmless} <= set(' \n3e'), harmless

def test_a_file_cut_at_any_length_is_refused(tmp_path, calm):
    told = write_json(tmp_path/'whole.json', dict(method='FedAvg()', accuracy=[.5])).read_bytes()
    for n in range(len(told)): refused(tmp_path/'r.json', read_json, told[:n])
    raw = calm.read_bytes()
    for n in [*range(600), *range(600, len(raw), 97)]:
        refused(tmp_path/'c.safetensors', lambda p: read_tensors(p, FORMAT), raw[:n])

def test_files_of_others_and_newer_ones_are_refused(tmp_path, calm):
    from safetensors.torch import save_file
    path = tmp_path/'c.safetensors'
    save_file(dict(a=torch.zeros(1)), path)
    with pytest.raises(ValueError, match="not one of fedlit") as e: Run.load(path)
    assert not isinstance(e.value, Damaged) # it is whole
    with pytest.raises(ValueError, match="is a folder"): Run.load(tmp_path)
    with pytest.raises(FileNotFoundError, match='none'): Run.load(tmp_path/'none')
    path.write_bytes(b'PK\3\4 an archive')
    with pytest.raises(Damaged, match='c.safetensors'): Run.load(path)
    for number in (FORMAT+1, FORMAT-1):
        write_tensors(path, {}, dict(format=number))
        with pytest.raises(ValueError, match='another one wrote it') as e: Run.load(path)
        assert not isinstance(e.value, Damaged)
    told = json.loads(write_json(tmp_path/'r.json', dict(a=1)).read_text(encoding='utf-8'))
    (tmp_path/'r.json').write_text('[1]', encoding='utf-8')
    with pytest.raises(Damaged, match="r.json is damaged: .*'list'"): read_json(tmp_path/'r.json')
    (tmp_path/'r.json').write_text(json.dumps(dict(told, format=files.JSON+1)), encoding='utf-8')
    with pytest.raises(ValueError, match='a newer one wrote it'): result(tmp_path/'r.json')

def test_a_file_of_another_kind_is_named_and_not_called_damaged(tmp_path, calm):
    told = write_json(tmp_path/'r.json', dict(a=1)).read_bytes()
    kinds = {'a JSON file': told, 'a safetensors file': calm.read_bytes(), 'an HTML page': b'<!doctype html>',
             'a zip archive': b'PK\3\4'}
    for read, right in (read_json, 'a JSON file'), (lambda p: read_tensors(p, FORMAT), 'a safetensors file'):
        for kind, raw in kinds.items():
            (tmp_path/'x').write_bytes(raw if kind != right else raw[:-9]) # which is damaged
            said = 'damaged: ' if kind == right else f'{kind}.*, but it must be {right}'
            with pytest.raises(Damaged, match=f'x is {said}'): read(tmp_path/'x')

def test_results_without_a_checksum_are_taken_as_they_are(tmp_path):
    (tmp_path/'r.json').write_text('{"accuracy": 0.5}', encoding='utf-8')
    assert result(tmp_path/'r.json') == dict(accuracy=.5) and result(tmp_path/'none.json') is None
    for bad in ('', '[]', 'null', '{"a": 1', '{"format": "x"}', '['*9999):
        (tmp_path/'r.json').write_text(bad, encoding='utf-8')
        with pytest.warns(UserWarning, match='r.json is damaged.*counts as missing'):
            assert result(tmp_path/'r.json') is None

# ---- the one before ----

HARMS = dict(cut=lambda raw: raw[:-9],
             flipped=lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
             foreign=lambda raw: b'something else',
             empty=lambda raw: b'',
             newer=lambda raw: Path(write_tensors(Path(os.environ['PYTEST_NEWER']), {}, dict(format=9))).read_bytes())

@pytest.mark.parametrize('harm', HARMS)
def test_a_run_goes_on_from_the_checkpoint_before_a_broken_one(tmp_path, monkeypatch, calm, harm):
    monkeypatch.setenv('PYTEST_NEWER', str(tmp_path/'newer'))
    monkeypatch.setattr(files, 'PAUSE', 0)
    file = tmp_path/'c.safetensors'
    go(2, file)
    broken = HARMS[harm](file.read_bytes())
    file.write_bytes(broken)
    with pytest.warns(UserWarning, match=r'c.safetensors.*goes on from .*c.safetensors.last'): run = go(3, file)
    assert content(file) == content(calm) and len(run.history) == 3
    assert (tmp_path/'c.safetensors.broken').read_bytes() == broken # set aside, not lost
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        go(3, file)

def test_where_no_checkpoint_is_whole_the_run_does_not_begin_again_in_silence(tmp_path):
    file = tmp_path/'c.safetensors'
    go(2, file)
    for f in (file, last(file)): f.write_bytes(f.read_bytes()[:-9])
    with pytest.raises(Damaged, match='c.safetensors is damaged.*c.safetensors.last is damaged.*'
                                      'move it away to begin again'):
        go(3, file)
    forget(file)
    assert len(go(1, file).history) == 1

def test_only_a_synced_checkpoint_is_kept_and_syncs_are_spaced(tmp_path, monkeypatch):
    monkeypatch.setattr(files, 'PAUSE', 1e12)
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, 'fsync', lambda f: (synced.append(f), fsync(f)))
    file, read = tmp_path/'t', lambda p: read_tensors(p, 1)[1]['a'].item()
    for k in range(5): write_tensors(file, dict(a=torch.tensor([k])), dict(format=1), keep=True)
    assert (read(file), read(last(file)), len(synced)) == (4, 0, 1 if os.name == 'nt' else 2)
    files._SYNCS.clear()      # a process that goes on, or a later moment
    for k in (5, 6): write_tensors(file, dict(a=torch.tensor([k])), dict(format=1), keep=True)
    assert (read(file), read(last(file))) == (6, 5)

# ---- no room, no right ----

@pytest.mark.skipif(not Path('/dev/full').exists(), reason='no /dev/full')
@pytest.mark.parametrize('write', [lambda p: write_file(p, b'y'), lambda p: write_json(p, {}),
                                   lambda p: write_tensors(p, dict(a=torch.ones(2)), dict(format=1))])
def test_a_full_device_is_named(write):
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"): write('/dev/full')

@needs_fork
def test_a_full_disk_loses_nothing_and_is_named(tmp_path, calm):
    file = tmp_path/'c.safetensors'
    go(1, file)
    before = file.read_bytes()
    def cramped():
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before)//2, -1))     # the system refuses the second half
        try: go(3, file)
        except OSError as e:
            assert f'the disk of {tmp_path} is full' in str(e)
            return
        raise AssertionError('nothing was refused')
    assert forked(cramped) == 0
    assert file.read_bytes() == before and not parts(tmp_path)
    go(3, file)
    assert content(file) == content(calm)

@pytest.mark.skipif(not sys.platform.startswith('linux') or not hasattr(os, 'geteuid') or os.geteuid() != 0,
                    reason='mounts a small disk, for which one must be root')
def test_on_a_disk_of_64_kb(tmp_path):
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64k', 'tmpfs', str(tmp_path)],
                      capture_output=True).returncode:
        pytest.skip('may not mount')
    try:
        write_file(tmp_path/'a', b'x'*30_000)
        with pytest.raises(OSError, match=f'the disk of {tmp_path} is full'): write_file(tmp_path/'a', b'y'*60_000)
        assert (tmp_path/'a').read_bytes() == b'x'*30_000 and not parts(tmp_path)
        write_file(tmp_path/'a', b'z'*30_000)
    finally: subprocess.run(['umount', str(tmp_path)], check=True)

@needs_links
def test_symbolic_links_are_not_written_through(tmp_path):
    (tmp_path/'far').write_text('mine', encoding='utf-8')
    for name in ('link', 'dangling'): (tmp_path/name).symlink_to(tmp_path/('far' if name == 'link' else 'nowhere'))
    for name in ('link', 'dangling'):
        with pytest.raises(ValueError, match=f'{name} is a symbolic link to'): write_json(tmp_path/name, dict(a=1))
    with pytest.raises(ValueError, match='symbolic link'): go(1, tmp_path/'dangling')
    with pytest.raises(ValueError, match='symbolic link'): writable(tmp_path/'dangling') # before anybody trains
    assert (tmp_path/'far').read_text(encoding='utf-8') == 'mine' and not (tmp_path/'nowhere').exists()
    (tmp_path/'there').mkdir()
    (tmp_path/'here').symlink_to(tmp_path/'there')
    # a folder that is a link is the user's own arrangement
    assert write_json(tmp_path/'here'/'r.json', dict(a=1)).exists()

@pytest.mark.skipif(os.name == 'nt', reason='there, a path is limited as a whole')
def test_a_name_may_be_nearly_as_long_as_names_can_be(tmp_path):
    "Such as one that lists all hyperparameters; around it, an unfinished file has more, and `last` five characters."
    file = tmp_path/('ä'*10 + 'x'*230)
    go(2, file)
    assert go(3, file).state.round == 3 and last(file).exists() and not parts(tmp_path)

@pytest.mark.skipif(not hasattr(os, 'mkfifo'), reason='Windows has no such pipes')
def test_a_pipe_is_written_into_and_stays_a_pipe(tmp_path):
    "As a device is: /dev/stdout, a link to a pipe, and /dev/null."
    pipe, link = tmp_path/'pipe', tmp_path/'link'
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (pipe, link):
        assert write_file(path, iter([b'all ', memoryview(b'of it')])) == path
        assert os.read(reader, 99) == b'all of it' and pipe.is_fifo() and link.is_symlink()
    os.close(reader)
    assert sorted(f.name for f in tmp_path.iterdir()) == ['link', 'pipe']

@pytest.mark.skipif(not os.path.exists('/dev/fd'), reason='no such folder on this system')
def test_a_result_may_go_to_a_pipe_or_device_in_a_folder_that_takes_no_files():
    "Such as --json /dev/null for a user who is not root, and --csv >(gzip > out.gz), which bash turns into /dev/fd/63."
    reader, writer = os.pipe()
    assert writable(f'/dev/fd/{writer}') == f'/dev/fd/{writer}'
    for end in reader, writer: os.close(end)
    with pytest.raises(OSError, match='/dev/fd/none cannot be written'): writable('/dev/fd/none')

# ---- from elsewhere ----

def tar(path, name, kind=tarfile.REGTYPE, to=''):
    with tarfile.open(path, 'w:gz') as t:
        for n, k in (('top/good', tarfile.REGTYPE), (name, kind)):
            m = tarfile.TarInfo(n)
            m.type, m.linkname, m.size = k, to if k != tarfile.REGTYPE else '', 3 if k == tarfile.REGTYPE else 0
            t.addfile(m, io.BytesIO(b'abc') if m.size else None)
    return path

def zipped(path, name, mode=0):
    with zipfile.ZipFile(path, 'w') as z:
        z.writestr('top/good', 'abc')
        m = zipfile.ZipInfo(name)
        m.external_attr = mode << 16
        z.writestr(m, 'abc')
    return path

BAD = [*[(make, dict(name=n))
         for make in (tar, zipped) for n in ('../out', 'top/../../out', '/tmp/fedlit-out', 'top/..')],
       (zipped, dict(name='..\\out')),
       (zipped, dict(name='C:\\out')),
       (tar, dict(name='top/l', kind=tarfile.SYMTYPE, to='/etc')),
       (tar, dict(name='top/l', kind=tarfile.LNKTYPE, to='../../out')),
       (tar, dict(name='top/l', kind=tarfile.FIFOTYPE)),
       (zipped, dict(name='top/l', mode=0o120777))]

@pytest.mark.parametrize('make,kw', BAD, ids=[f'{m.__name__} {k}' for m, k in BAD])
def test_archives_that_lead_out_of_the_folder_are_refused(tmp_path, make, kw):
    folder = tmp_path/'in'
    folder.mkdir()
    with pytest.raises(ValueError, match='is refused: .*(leads out of the folder|is a link or a device)'):
        unpack(make(tmp_path/'archive', **kw), folder, 'top')
    assert (not list(folder.iterdir()) and [f.name for f in tmp_path.iterdir() if f.name != 'in'] == ['archive']
            and not Path('/tmp/fedlit-out').exists())

@pytest.mark.parametrize('make', [tar, zipped])
def test_good_archives_appear_whole(tmp_path, make):
    got = unpack(make(tmp_path/'archive', 'top/deep/er'), tmp_path, 'top')
    assert (got/'good').read_text('utf-8') == (got/'deep'/'er').read_text('utf-8') == 'abc' and not parts(tmp_path)
    with pytest.raises(FileExistsError, match='is there already'): unpack(tmp_path/'archive', tmp_path, 'top')

class Answer(io.BytesIO):
    def __init__(self, data, url):
        super().__init__(data)
        self.url, self.headers = url, {}

def test_downloads_are_known_by_their_checksum(tmp_path, monkeypatch):
    import hashlib, urllib.request
    right, asked = hashlib.sha256(b'data').hexdigest(), []
    def serve(data, url='https://mirror.example.org/x'):
        monkeypatch.setattr(urllib.request, 'urlopen', lambda u, timeout: asked.append(u) or Answer(data, url))
    get = lambda: fetch('https://example.org/x', tmp_path/'x', right)
    serve(b'dato')
    with pytest.raises(Damaged, match='nothing was kept'): get()
    serve(b'data', 'http' + '://mirror.example.org/x')
    with pytest.raises(ValueError, match='not an https address'): get()
    assert not list(tmp_path.iterdir())
    serve(b'data')
    # the second time it is there
    assert get().read_bytes() == b'data' and get().read_bytes() == b'data' and len(asked) == 3
    with pytest.raises(ValueError, match='not an https address'): fetch('file:///etc/passwd', tmp_path/'y', right)

# ---- packed results ----

def test_every_changed_bit_of_a_packed_result_is_refused_or_changes_nothing(tmp_path):
    said = {f'{n}.json': dict(seed=n, accuracy=[.5, n/4]) for n in range(2)}
    for name, r in said.items(): write_json(tmp_path/'runs'/name, r)
    raw = bytearray(pack(tmp_path/'runs').read_bytes())
    for i in range(len(raw)):
        raw[i] ^= 4
        files.pack_of(tmp_path/'runs').write_bytes(raw)
        files._lines.cache_clear()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter('always')
            try: seen = {name: result(tmp_path/'runs'/name) for name in said}
            except ValueError as e:
                assert 'a newer one wrote it' in str(e) # the number of the format was hit
                seen = said
        assert all(seen[name] in (None, r) for name, r in said.items()), (i, seen)
        if seen != said: assert heard
        raw[i] ^= 4

def test_of_a_packed_file_that_was_cut_off_the_rest_is_read(tmp_path):
    said = {f'{n:03}.json': dict(seed=n, accuracy=torch.rand(400).tolist()) for n in range(40)}
    for name, r in said.items(): write_json(tmp_path/'runs'/name, r)
    raw = pack(tmp_path/'runs').read_bytes()
    files.pack_of(tmp_path/'runs').write_bytes(raw[:len(raw)//2])
    files._lines.cache_clear()
    with pytest.warns(UserWarning, match='was cut off'): seen = files.all_results(tmp_path/'runs')
    assert 5 < len(seen) < 30 and list(seen) == sorted(said)[:len(seen)]

def test_a_packed_folder_packs_again_to_the_same_bytes_and_loses_nothing(tmp_path):
    for n in (3, 1, 2): write_json(tmp_path/'runs'/f'{n}.json', dict(seed=n, accuracy=1/n, setting=dict(lr=.1+.2)))
    (tmp_path/'runs'/'bad.json').write_text('{', encoding='utf-8')
    with pytest.warns(UserWarning, match='bad.json is damaged'): one = pack(tmp_path/'runs')
    first = one.read_bytes()
    assert [f.name for f in (tmp_path/'runs').iterdir()] == ['bad.json'] # for a person to look at
    (tmp_path/'runs'/'bad.json').unlink()
    assert pack(tmp_path/'runs').read_bytes() == first
    assert result(tmp_path/'runs'/'3.json') == dict(seed=3, accuracy=.3333333, setting=dict(lr=.1+.2))
    with pytest.raises(ValueError, match='no results in'): pack(tmp_path/'none')

def test_a_folder_that_is_packed_again_within_a_tick_of_the_clock_is_read_again(tmp_path):
    for accuracy in (.25, .5):
        write_json(tmp_path/'runs'/'1.json', dict(accuracy=accuracy))
        os.utime(pack(tmp_path/'runs'), ns=(0, 0))
        assert result(tmp_path/'runs'/'1.json') == dict(accuracy=accuracy)

def test_a_folder_is_not_written_over(tmp_path):
    with pytest.raises(IsADirectoryError, match='is a folder; name a file in it'): write_file(tmp_path, b'')
