"Folders of pictures as people have them: too large, cut off, of 16 bits, pipes, empty classes, lists that do not fit."
import io, os, re, resource, struct, threading, time, zlib
import numpy as np, pytest, torch
from fedlit.data import Task, load
from test_files import forked, needs_fork
Image = pytest.importorskip('PIL.Image')

def picture(path, size=(64, 64), colour=(200, 30, 90), **kw):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new('RGB', size, colour).save(path, **kw)

@pytest.fixture
def office(tmp_path):
    base = tmp_path/'office_caltech_10'
    for d in ('amazon', 'dslr'):
        for c in ('bike', 'mug'):
            for n in range(3): picture(base/d/c/f'{n}.jpg')
    return base

@pytest.fixture
def tiny(tmp_path):
    base = tmp_path/'tiny-imagenet-200'
    for wnid in ('n01', 'n02'): picture(base/'train'/wnid/'images'/f'{wnid}_0.JPEG')
    for n in range(2): picture(base/'val'/'images'/f'val_{n}.JPEG')
    (base/'val'/'val_annotations.txt').write_text('val_0.JPEG\tn01\t0\t0\t1\t1\nval_1.JPEG\tn02\t0\t0\t1\t1\n', 'utf-8')
    return base

def bomb(path, side, rows=0):
    "A PNG that says that it is `side` pixels wide and high."
    chunk = lambda kind, data: struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
    made = zlib.compressobj(9)
    data = b''.join(made.compress(bytes(1 + 3*side)) for _ in range(rows)) + made.flush()
    path.write_bytes(b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', side, side, 8, 2, 0, 0, 0))
                     + chunk(b'IDAT', data) + chunk(b'IEND', b''))

def cut(path):
    raw = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(raw, 'png')
    path.write_bytes(raw.getvalue()[:len(raw.getvalue())//2])

def textbomb(path):
    from PIL.PngImagePlugin import PngInfo
    info = PngInfo()
    info.add_text('Comment', 'x'*10**8, zip=True)
    Image.new('RGB', (8, 8)).save(path, pnginfo=info)

HARMS = dict(huge=lambda p: bomb(p, 50_000), large=lambda p: bomb(p, 13_000), cut=cut,
             empty=lambda p: p.write_bytes(b''),
             text=lambda p: p.write_bytes(b'no picture'), pipe=lambda p: os.mkfifo(p), folder=lambda p: p.mkdir(),
             comment=textbomb, postscript=lambda p: p.write_bytes(b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n'),
             real=lambda p: Image.new('F', (8, 8)).save(p, 'tiff'))

@needs_fork
@pytest.mark.filterwarnings('ignore:Image size')
@pytest.mark.parametrize('harm', HARMS)
def test_a_picture_that_cannot_be_read_is_named(tmp_path, office, harm):
    file = office/'dslr'/'mug'/'1.png'
    HARMS[harm](file)
    def cramped():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(ValueError, match=re.escape(str(file))) as e: load('office_caltech10', tmp_path)
        assert '\n' not in str(e.value) and len(str(e.value)) < 400
        assert time.process_time() < 30
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)/1024 < 400     # MiB
    assert forked(cramped) == 0

def test_a_picture_that_cannot_be_read_just_now_is_not_damaged(tmp_path, office, monkeypatch):
    real = Image.open
    def stale(path, *args, **kw):
        if str(path).endswith('dslr/mug/1.jpg'): raise OSError(116, 'Stale file handle')
        return real(path, *args, **kw)
    monkeypatch.setattr(Image, 'open', stale)
    with pytest.raises(OSError, match='1.jpg cannot be read just now') as e: load('office_caltech10', tmp_path)
    assert 'damaged' not in str(e.value)

@pytest.mark.slow
def test_several_large_pictures_are_read_one_after_the_other(tmp_path, office):
    for n in range(6): bomb(office/'dslr'/'mug'/f'big{n}.png', 5000, 5000)
    def cramped():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        load('office_caltech10', tmp_path)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)/1024
        assert grown < 300 # one is 95 MiB
    assert forked(cramped) == 0

def test_grey_pictures_of_16_bits_keep_their_greys(tmp_path, office):
    levels = np.linspace(0, 65535, 64*64).reshape(64, 64)
    Image.fromarray(levels.astype(np.uint16)).save(office/'dslr'/'mug'/'grey.png')
    task = load('office_caltech10', tmp_path, test=.1)
    both = torch.cat([task.x_train, task.x_test])
    grey = next(x for x in both if (x[0] == x[1]).all())
    assert torch.equal(grey[0], torch.from_numpy((levels.astype(np.int64) >> 8).astype(np.uint8)))

def test_an_empty_class_is_named(tmp_path, office, tiny):
    (office/'dslr'/'lamp').mkdir()
    with pytest.raises(ValueError, match=r'dslr.lamp has no pictures'): load('office_caltech10', tmp_path)
    (tiny/'train'/'n03'/'images').mkdir(parents=True)
    with pytest.raises(ValueError, match=r'n03.images has no pictures'): load('tiny_imagenet', tmp_path)
    (tiny/'train'/'n03'/'images').rmdir()
    with pytest.raises(ValueError, match=r'n03.images has no pictures'): load('tiny_imagenet', tmp_path)

def test_too_few_pictures_are_named(tmp_path):
    picture(tmp_path/'office_caltech_10'/'dslr'/'mug'/'0.jpg')
    with pytest.raises(ValueError, match='test=0.2 of 1 samples, .* leave some to train on'):
        load('office_caltech10', tmp_path)
    empty = tmp_path/'e'/'office_caltech_10'/'dslr'
    empty.mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match='office_caltech10: nothing usable'):
        load('office_caltech10', tmp_path/'e')

@pytest.mark.parametrize('text, said', [
    ('', 'is empty'),
    ('val_0.JPEG\tn01\nnonsense\n', r"line 2: 'nonsense' is not a picture, a tab and one of the 2 classes"),
    ('val_0.JPEG\tn99\t0\n', 'line 1'), ('\n\nval_0.JPEG n01\n', 'line 3'),
    ('../../../secret.JPEG\tn01\n', 'line 1.*leads out of the folder'),
    ('/etc/x.JPEG\tn01\n', 'leads out of the folder')])
def test_annotations_that_do_not_fit_are_named(tmp_path, tiny, text, said):
    (tiny/'val'/'val_annotations.txt').write_text(text, encoding='utf-8')
    with pytest.raises(ValueError, match=rf'val_annotations.txt.*{said}'): load('tiny_imagenet', tmp_path)

def test_annotations_that_are_no_text_are_named(tmp_path, tiny):
    (tiny/'val'/'val_annotations.txt').write_bytes(b'\xff\xfe\x00\x81')
    with pytest.raises(ValueError, match='val_annotations.txt is no text'): load('tiny_imagenet', tmp_path)

def test_a_picture_that_is_listed_and_not_there_is_named(tmp_path, tiny):
    (tiny/'val'/'images'/'val_1.JPEG').unlink()
    with pytest.raises(FileNotFoundError, match='val_1.JPEG'): load('tiny_imagenet', tmp_path)

def test_a_pipe_does_not_hold_the_process(tmp_path, office):
    os.mkfifo(office/'amazon'/'bike'/'x.jpg')
    said = []
    def read():
        try: load('office_caltech10', tmp_path)
        except ValueError as e: said.append(str(e))
    t = threading.Thread(target=read, daemon=True)
    t.start()
    t.join(20)
    assert not t.is_alive() and 'x.jpg is no file, but a folder, a pipe or a device' in said[0]

def test_pictures_of_another_kind_are_said(tmp_path):
    for n in range(4):
        for c in 'ab': picture(tmp_path/c/f'{n}.png', colour=(60*n, 40*n, 80*n))
    picture(tmp_path/'b'/'scan.bmp')
    (tmp_path/'b'/'.hidden').write_text('', encoding='utf-8')
    with pytest.warns(UserWarning, match='not read: 1 file, first .*scan.bmp; pictures must be'):
        Task.from_folder(tmp_path, size=4, test=.5)

@pytest.mark.parametrize('where, stray, many', [
    ('', ['lost.png', 'a/more/0.jpg'], 2), ('ann', ['lost.png', 'ann/lost.png', 'ann/a/more/0.png'], 3),
    ('', [f'{c}/small/{n}.png' for c in 'ab' for n in range(4)], 8)], ids=['beside and below', 'owners', 'small'])
def test_pictures_outside_the_folders_of_classes_are_said(tmp_path, where, stray, many):
    "With a folder in each class, classes pass for owners, and their own pictures are those outside."
    for c in 'ab':
        for n in range(4): picture(tmp_path/where/c/f'{n}.png', colour=(60*n, 40*n, 80*n))
    for n, name in enumerate(stray): picture(tmp_path/name, colour=(9*n, 7*n, 5*n))
    for name in ('README.md', 'a/.ipynb_checkpoints/0.png'):
        (tmp_path/where/name).parent.mkdir(exist_ok=True)
        (tmp_path/where/name).write_text('', encoding='utf-8')
    with pytest.warns(UserWarning, match=f'^not read: {many} files?, first .*png; .* in the folder of a class$'):
        Task.from_folder(tmp_path, size=4, test=.5)

def test_a_photo_taken_with_the_camera_turned_stands_upright(tmp_path):
    photo = Image.new('RGB', (8, 8))
    photo.paste((255, 255, 255), (0, 0, 4, 8)) # the sensor's left half is white
    exif = photo.getexif()
    exif[274] = 6 # turn it a quarter to the right: the left half is then above
    for n in range(4):
        (tmp_path/'mug').mkdir(exist_ok=True)
        photo.save(tmp_path/'mug'/f'{n}.png', exif=exif)
    x = Task.from_folder(tmp_path, size=8, test=.5).x_train
    assert (x[:, :, :4] == 255).all() and (x[:, :, 4:] == 0).all()

def test_a_folder_that_is_no_owner_among_owners_is_named(tmp_path):
    for owner in 'ab':
        for n in range(4): picture(tmp_path/owner/'mug'/f'{n}.png')
    picture(tmp_path/'notes'/'0.png')
    with pytest.raises(ValueError, match='a has no pictures but folders, .* and .*notes has no folders; either all'):
        Task.from_folder(tmp_path, size=4, test=.5)

@pytest.mark.parametrize('size', [0, -3, 2.5, 'a', (4, 4)])
def test_a_size_that_is_none_is_named(tmp_path, size):
    for n in range(4): picture(tmp_path/'mug'/f'{n}.png')
    with pytest.raises(ValueError, match='^size=.*, but it must be the pixels of a side'):
        Task.from_folder(tmp_path, size=size, test=.5)
