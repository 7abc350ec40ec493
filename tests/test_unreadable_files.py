"Files that cannot be read just now, that were removed, that another process writes, on disks that cannot sync."
import errno, json, lzma, math, os, platform, stat, subprocess, sys, time, warnings
import pytest, torch
from fedlit.ground import files
from bench.pack import pack
from fedlit.ground.files import (Damaged, last, newest, read_json, read_tensors, result, write_file, write_json,
                                 write_tensors)
from fedlit.result import Run
from fedlit.cli import main
from fedlit.models import build
from fedlit.run import federate, Simulation
from fedlit.methods import FedAvg
from test_files import CLIENTS, TASK, content, forked, go, killed_at, needs_fork

posix = pytest.mark.skipif(os.name == 'nt', reason='permissions, locks and pipes of POSIX')

def names(folder): return sorted(f.name for f in folder.iterdir())

# ---- not now ----

ERRORS = dict(files=OSError(errno.EMFILE, 'Too many open files'), stale=OSError(errno.ESTALE, 'Stale file handle'),
              disk=OSError(errno.EIO, 'Input/output error'), system=OSError(errno.ENFILE, 'no'), memory=MemoryError())

@pytest.mark.parametrize('error', ERRORS)
def test_a_file_that_cannot_be_read_just_now_is_not_damaged(tmp_path, monkeypatch, calm, error):
    file = tmp_path/'c.safetensors'
    for f in (file, last(file)): f.write_bytes(calm.read_bytes())
    there = write_json(tmp_path/'r.json', dict(a=1))
    before, real = names(tmp_path), type(file).read_bytes
    with monkeypatch.context() as m:
        def fails(self):
            if self.name in ('c.safetensors', 'r.json'): raise ERRORS[error]
            return real(self)
        m.setattr(type(file), 'read_bytes', fails)
        for read in (lambda: go(4, file), lambda: Run.load(file), lambda: result(there), lambda: read_json(there)):
            with pytest.raises(OSError, match=r'(c.safetensors|r.json) cannot be read just now') as e: read()
            assert 'damaged' not in str(e.value) and 'remove it' not in str(e.value)
            assert e.value.errno == (getattr(ERRORS[error], 'errno', None) or errno.ENOMEM)
    assert names(tmp_path) == before and content(file) == content(calm)
    assert len(go(3, file).history) == 3 and result(there) == dict(a=1)

@needs_fork
def test_too_many_open_files_of_a_real_process(calm):
    def cramped():
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        held = []
        try:
            while True: held.append(os.open('/dev/null', os.O_RDONLY))
        except OSError: pass
        try: newest(calm, lambda p: read_tensors(p, 4))
        except OSError as e:
            assert f'{calm} cannot be read just now (Too many open files)' in str(e) and 'damaged' not in str(e)
            return
        raise AssertionError('it was read')
    assert forked(cramped) == 0

@posix
def test_a_pipe_is_no_file_and_nobody_waits_for_it(tmp_path):
    os.mkfifo(tmp_path/'pipe')
    for read in (lambda p: read_tensors(p, 4), read_json, Run.load):
        with pytest.raises(ValueError, match='pipe is a pipe or a device, and no file'): read(tmp_path/'pipe')

# ---- what is set aside ----

@pytest.mark.filterwarnings('ignore:.*it is set aside as')
def test_a_second_broken_file_does_not_replace_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(files, 'PAUSE', 0)
    file, broken = tmp_path/'c.safetensors', []
    for rounds in (2, 3, 4):
        go(rounds, file)
        broken.append(file.read_bytes()[:-9])
        file.write_bytes(broken[-1])
    go(4, file)
    kept = [tmp_path/f'c.safetensors.broken{end}' for end in ('', '.2', '.3')]
    assert [f.read_bytes() for f in kept] == broken

def test_a_removed_checkpoint_is_begun_again(tmp_path, monkeypatch, calm):
    monkeypatch.setattr(files, 'PAUSE', 0)
    file = tmp_path/'c.safetensors'
    go(2, file)
    before = last(file).read_bytes()
    file.unlink()
    with pytest.warns(UserWarning, match=r'begins again.*c.safetensors.last, is kept as c.safetensors.before'):
        assert len(go(3, file).history) == 3
    assert content(file) == content(calm) and (tmp_path/'c.safetensors.before').read_bytes() == before
    file.unlink()                       # and the way back
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        newest(file, lambda p: None)
    os.replace(tmp_path/'c.safetensors.before', file)
    go(3, file)
    assert content(file) == content(calm)

def test_another_runs_predecessor_does_not_stop_a_new_run(tmp_path, monkeypatch):
    monkeypatch.setattr(files, 'PAUSE', 0)
    file = tmp_path/'c.safetensors'
    go(2, file)
    file.unlink()
    with pytest.warns(UserWarning, match='begins again'):
        federate(build('mlp', TASK, seed=0), TASK, CLIENTS, FedAvg(), 1, checkpoint=file, progress=False)

@pytest.mark.slow
@needs_fork
def test_killed_where_a_file_can_have_one_name_only(tmp_path, monkeypatch, calm):
    monkeypatch.setattr(files, 'PAUSE', 0)
    def no(*args): raise OSError(errno.EPERM, 'Operation not permitted')
    monkeypatch.setattr(os, 'link', no)
    for n in range(1, 100):
        file = tmp_path/str(n)/'c.safetensors'
        if killed_at(n, lambda: go(3, file)): break
        assert file.exists() or not last(file).exists()
        assert forked(lambda: go(3, file)) == 0 and content(file) == content(calm), n
    assert n > 18

def test_a_checkpoint_has_its_name_at_every_moment(tmp_path, monkeypatch):
    monkeypatch.setattr(files, 'PAUSE', 0)
    file, seen, replace = tmp_path/'t', [], os.replace
    def look(a, b):
        seen.append(file.exists())
        replace(a, b)
        seen.append(file.exists())
    write_tensors(file, {}, dict(format=1), keep=True)
    monkeypatch.setattr(os, 'replace', look)
    for k in range(3): write_tensors(file, dict(a=torch.tensor([k])), dict(format=1), keep=True)
    assert len(seen) == 12 and all(seen) and names(tmp_path) == ['t', 't.last']

# ---- permissions, disks that do not sync, other writers ----

@posix
@pytest.mark.parametrize('mode', [0o600, 0o640, 0o444])
def test_permissions_stay(tmp_path, monkeypatch, mode):
    monkeypatch.setattr(files, 'PAUSE', 0)
    file, seen = tmp_path/'c.safetensors', []
    go(1, file)
    file.chmod(mode)
    real = os.fsync
    monkeypatch.setattr(os, 'fsync', lambda f: (seen.append(stat.S_IMODE(os.fstat(f).st_mode)), real(f)))
    go(3, file)
    assert {stat.S_IMODE(f.stat().st_mode) for f in (file, last(file))} == {mode}
    assert seen[::2] == [mode]*2        # of the file before it has its name
    write_json(tmp_path/'r.json', dict(a=1))
    (tmp_path/'r.json').chmod(mode)
    write_json(tmp_path/'r.json', dict(a=2))
    assert stat.S_IMODE((tmp_path/'r.json').stat().st_mode) == mode

@posix
@pytest.mark.parametrize('number', [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_folder_that_cannot_be_synced_stops_nothing(tmp_path, monkeypatch, calm, number):
    monkeypatch.setattr(files, 'PAUSE', 0)
    real = os.fsync
    def fsync(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode): raise OSError(number, os.strerror(number))
        real(handle)
    monkeypatch.setattr(os, 'fsync', fsync)
    go(3, tmp_path/'c.safetensors')
    assert content(tmp_path/'c.safetensors') == content(calm)
    def broken(handle): raise OSError(errno.EIO, 'Input/output error')
    monkeypatch.setattr(os, 'fsync', broken)
    with pytest.raises(OSError, match='Input/output'): write_json(tmp_path/'r.json', dict(a=1))
    assert not (tmp_path/'r.json').exists()

@needs_fork
def test_an_unfinished_file_is_swept_when_its_owner_is_gone_whatever_the_clock_says(tmp_path):
    gone = subprocess.Popen([sys.executable, '-c', ''])
    gone.wait()
    here = platform.node()
    def make(name, pid, machine=here): return tmp_path/f'.{name}.{machine}-{pid}-00ab.part'
    dead, alive, other, notes = (make('a.json', gone.pid), make('a.json', os.getpid()), make('b.json', gone.pid),
                                 tmp_path/'.a.json.notes.part')
    far = make('a.json', gone.pid, 'elsewhere')       # where this number may be alive
    for f in (dead, alive, other, notes, far):
        f.write_text('half', encoding='utf-8')
        if f != dead: os.utime(f, (time.time() - 10**6,)*2)
    write_json(tmp_path/'a.json', dict(a=1))
    assert not dead.exists() and alive.exists() and other.exists() and notes.exists() and far.exists()

@needs_fork
def test_a_slow_writer_is_not_disturbed(tmp_path, monkeypatch):
    "Another process writes the same file again and again while this one is in the middle of it, with its clock ahead."
    code = '''if True:
        import sys, time
        from fedlit.ground.files import write_file
        time.time = lambda now=time.time: now() + 10**6
        for _ in range(20): write_file(sys.argv[1], b'other')'''
    def slow():
        yield b'ours, '
        subprocess.run([sys.executable, '-c', code, tmp_path/'a'], check=True)
        yield b'whole'
    write_file(tmp_path/'a', slow())
    assert (tmp_path/'a').read_bytes() == b'ours, whole' and names(tmp_path) == ['a']

# ---- strict JSON ----

def refuse(word): raise AssertionError(f'{word} is no JSON')

def test_what_is_not_finite_is_written_as_json_that_others_read(tmp_path):
    said = dict(loss=[math.inf, -math.inf, math.nan, .5], text='NaN "Infinity" \\ -Infinity', deep=dict(a=math.nan))
    text = write_json(tmp_path/'r.json', said).read_text(encoding='utf-8')
    json.loads(text, parse_constant=refuse)
    read = read_json(tmp_path/'r.json')
    assert read == dict(said, loss=[math.inf, -math.inf, None, .5], deep=dict(a=None))
    (tmp_path/'runs').mkdir()
    os.replace(tmp_path/'r.json', tmp_path/'runs'/'r.json')
    lines = lzma.decompress(pack(tmp_path/'runs').read_bytes()).splitlines()
    for line in lines: json.loads(line, parse_constant=refuse)
    assert result(tmp_path/'runs'/'r.json') == read

def test_finite_results_are_written_as_ever(tmp_path):
    said = dict(method='FedAvg()', accuracy=[.5, 1e-7, None], rounds=3)
    assert write_json(tmp_path/'r.json', said).read_bytes() == json.dumps(
        dict(said, format=files.JSON, crc32=files._sum(said)), indent=1).encode()

def test_the_command_line_writes_strict_json(tmp_path, monkeypatch):
    real = Simulation.score_global
    monkeypatch.setattr(Simulation, 'score_global', lambda *a: dict(real(*a), loss=math.inf))
    main(['run', '--quiet', '--rounds', '1', '--epochs', '1', '--alpha', 'inf', '--json', str(tmp_path/'a.json')])
    read = json.loads((tmp_path/'a.json').read_text(encoding='utf-8'), parse_constant=refuse)
    assert read['settings']['setting']['partition'] == 'dirichlet(alpha=inf)' and read['history'][0]['loss'] == math.inf
    monkeypatch.undo()
    main(['run', '--quiet', '--from', str(tmp_path/'a.json'), '--json', str(tmp_path/'b.json')])
    same = lambda f: [row['accuracy'] for row in json.loads((tmp_path/f).read_text(encoding='utf-8'))['history']]
    assert same('a.json') == same('b.json')

def test_a_format_that_is_no_number_is_named(tmp_path):
    for form in ('x', [1], True, 2.5, None):
        (tmp_path/'r.json').write_text(json.dumps(dict(a=1, format=form, crc32=files._sum(dict(a=1)))), 'utf-8')
        with pytest.raises(Damaged, match='r.json is damaged: its format is'): read_json(tmp_path/'r.json')
