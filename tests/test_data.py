"The loaders, their faults, and the augmentations against torchvision and scipy."
import shutil
import numpy as np, pytest, torch
from PIL import Image
import fedlit.data as data
import fedlit.ground.readers as readers
from conftest import DATA
from fedlit.data import AutoAugment, Crop, Flip, Rotate, Task, load, prepare, recipe

def needs(folder):
    return pytest.mark.skipif(not (DATA/folder).exists(),
                              reason=f"no {DATA/folder} on this machine; FEDLIT_DATA says where")
def gen(seed=0): return torch.Generator().manual_seed(seed)

@pytest.fixture(scope="module")
def photos():
    "Sixteen 32x32 crops of scikit-learn's two photographs, and two hard cases: one flat, one of two levels."
    from sklearn.datasets import load_sample_images
    corners = [(r, c) for r in (0, 200) for c in (0, 130, 260, 390)]
    crops = [torch.tensor(im)[r:r + 128, c:c + 128].permute(2, 0, 1).float()
             for im in load_sample_images().images for r, c in corners]
    x = torch.nn.functional.interpolate(torch.stack(crops), (32, 32), mode="area").round().to(torch.uint8)
    flat = torch.full((1, 3, 32, 32), 77, dtype=torch.uint8)
    two = torch.randint(2, (1, 3, 32, 32), generator=gen()).to(torch.uint8) * 90
    return torch.cat([x, flat, two])

# --- tasks ---------------------------------------------------------------------------------------------------------

def test_digits():
    a, b = load("digits"), load("digits")
    assert a.x_train.shape == (1438, 1, 8, 8) and a.x_test.shape == (359, 1, 8, 8) and a.classes == 10
    assert (a.x_train.dtype == torch.float32 and a.y_train.dtype == torch.int64
            and 0 <= a.x_train.min() and a.x_train.max() == 1)
    assert torch.equal(a.x_train, b.x_train) and torch.equal(a.y_test, b.y_test)
    assert torch.bincount(a.y_test).min() >= 34
    rows = torch.cat([a.x_train, a.x_test]).flatten(1)
    from sklearn.datasets import load_digits
    whole = torch.tensor(load_digits().images / 16, dtype=torch.float32).flatten(1)
    assert torch.equal(rows.sum(1).sort().values, whole.sum(1).sort().values) # nothing lost, nothing twice

def test_subset_is_seeded_and_stratified():
    t = load("digits")
    a, b, c = t.subset(50, seed=1), t.subset(50, seed=1), t.subset(50, seed=2)
    assert torch.equal(a.x_train, b.x_train) and not torch.equal(a.x_train, c.x_train)
    assert (torch.bincount(a.y_train).tolist() == [5] * 10 and len(a.y_test) == 359
            and len(t.subset(50, test=20).y_test) == 20)
    with pytest.raises(ValueError, match="cannot take 5000 of the 1438"): t.subset(5000)

def test_normalise_any_leading_dims_and_bytes():
    t = Task("mine", *(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, 1])) * 2, classes=2,
             mean=(.1, .2, .3), std=(.5, .6, .7))
    x = torch.randint(256, (5, 2, 3, 4, 4), generator=gen()).to(torch.uint8)
    want = (x.double() / 255 - torch.tensor(t.mean).view(3, 1, 1)) / torch.tensor(t.std).view(3, 1, 1)
    assert (torch.allclose(t.normalise(x), want.float(), atol=1e-6)
            and torch.allclose(t.normalise(x.float() / 255), want.float(), atol=1e-6))
    assert t.normalise(x).dtype == torch.float32

def test_repr_is_short(): assert len(repr(load("digits_domains"))) < 200 and "tensor" not in repr(load("digits"))

def test_digits_domains():
    t = load("digits_domains")
    assert t.x_train.shape[0] == 1438 and t.x_test.shape[0] == 4 * 359 and len(t.domains) == 4
    assert (torch.bincount(t.domain_train).tolist() == [360, 360, 359, 359]
            and t.x_train.min() >= 0 and t.x_train.max() <= 1)
    for k in range(4): assert torch.bincount(t.y_train[t.domain_train == k]).min() >= 33
    assert torch.equal(t.x_train, load("digits_domains").x_train)

# --- faults ---------------------------------------------------------------------------------------------------------

def test_unknown_name():
    with pytest.raises(ValueError, match="cifar10"): load("cifar11")
    with pytest.raises(ValueError, match="office_caltech10"): load("office")

@pytest.mark.parametrize("name", ["mnist", "emnist", "fashion_mnist", "cifar10", "cifar100",
                                  "tiny_imagenet", "office_caltech10", "domainnet"])
def test_missing_files_say_what_to_do(name, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"(?s){name}.*{tmp_path}.*(download=True|put pictures|Unpack)"):
        load(name, tmp_path)

def test_root_from_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIT_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=str(tmp_path)): load("cifar10")

@needs("cifar-10-batches-py")
def test_damaged_cifar(tmp_path):
    shutil.copytree(DATA / "cifar-10-batches-py", tmp_path / "cifar-10-batches-py", copy_function=shutil.copyfile)
    f = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    f.parent.chmod(0o755)
    f.write_bytes(f.read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged: data_batch_3"): load("cifar10", tmp_path)
    f.unlink()
    with pytest.raises(FileNotFoundError, match="cifar10"): load("cifar10", tmp_path)

def idx(path, x): # an idx file as the MNIST family has them
    x = np.asarray(x, dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes([0, 0, 8, x.ndim]) + b"".join(int(s).to_bytes(4, "big") for s in x.shape) + x.tobytes())

def mnist_like(raw, prefix="", first=0, classes=10):
    for half, n in (("train", 30), ("t10k" if not prefix else "test", 20)):
        x = np.zeros((n, 28, 28))
        x[:, 3, 20] = 200
        idx(raw / f"{prefix}{half}-images-idx3-ubyte", x)
        idx(raw / f"{prefix}{half}-labels-idx1-ubyte", first + np.arange(n) % classes)

def test_mnist_family_from_small_files(tmp_path):
    mnist_like(tmp_path / "FashionMNIST/raw")
    mnist_like(tmp_path / "MNIST/raw")
    mnist_like(tmp_path / "EMNIST/raw", "emnist-balanced-", classes=47)
    mnist_like(tmp_path / "EMNIST/raw", "emnist-letters-", first=1, classes=26)
    a, b, c = load("fashion_mnist", tmp_path), load("emnist", tmp_path), load("emnist", tmp_path, split="letters")
    assert a.x_train.shape == (30, 1, 28, 28) and a.x_train[0, 0, 3, 20] == 200 and len(a.labels) == 10
    assert b.classes == 47 and b.x_train[0, 0, 20, 3] == 200 # upright
    assert c.classes == 26 and c.y_train.min() == 0 and c.labels[0] == "a"
    assert load("mnist", tmp_path).mean == (.1307,)

def test_truncated_mnist(tmp_path):
    mnist_like(tmp_path / "MNIST/raw")
    f = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    f.write_bytes(f.read_bytes()[:-100])
    with pytest.raises(ValueError, match="mnist: a file in .* is damaged"): load("mnist", tmp_path)

def picture(path, colour, size=64):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", (size, size), colour).save(path)

def test_tiny_imagenet_layout(tmp_path):
    base, rows = tmp_path / "tiny-imagenet-200", []
    for k, w in enumerate(("n02", "n01")):
        for i in range(3): picture(base / f"train/{w}/images/{w}_{i}.JPEG", (100 * k, 0, 0))
        picture(base / f"val/images/val_{k}.JPEG", 50)
        rows.append(f"val_{k}.JPEG\t{w}\t0\t0\t62\t62")
    (base / "val/val_annotations.txt").write_text("\n".join(rows) + "\n", encoding='utf-8')
    t = load("tiny_imagenet", tmp_path)
    assert (t.x_train.shape == (6, 3, 64, 64) and t.labels == ("n01", "n02")
            and t.y_test.tolist() == [1, 0] and t.augment == (AutoAugment(),))
    assert t.x_train[0, 0].float().mean() > 90 and t.mean == (.5, .5, .5)
    (base / "val/images/val_0.JPEG").write_bytes((base / "val/images/val_0.JPEG").read_bytes()[:100])
    with pytest.raises(ValueError, match="val_0.JPEG is damaged"): load("tiny_imagenet", tmp_path)

def test_domainnet_layout(tmp_path):
    base, names = tmp_path / "domainnet", ("clipart", "sketch")
    for d in names:
        lines = []
        for k, c in enumerate(("aircraft", "bird", "zebra")):
            picture(base / d / c / f"{d}_{k}.png", (10 * k, 20, 30), size=40)
            lines.append(f"{d}/{c}/{d}_{k}.png {k}")
        for part in ("train", "test"): (base / f"{d}_{part}.txt").write_text("\n".join(lines), encoding='utf-8')
    t = load("domainnet", tmp_path, domains=names, size=16)
    assert (t.x_train.shape == (4, 3, 16, 16) and t.classes == 10
            and t.y_train.tolist() == [0, 9, 0, 9] and t.domain_train.tolist() == [0, 0, 1, 1])
    with pytest.raises(FileNotFoundError, match="painting_train.txt"): load("domainnet", tmp_path)
    with pytest.raises(ValueError, match="none of the classes"):
        load("domainnet", tmp_path, domains=names, classes=("nothing",))

# --- real files -----------------------------------------------------------------------------------------------------

@needs("cifar-10-batches-py")
def test_cifar10():
    t = load("cifar10", DATA)
    assert (t.x_train.shape == (50000, 3, 32, 32) and t.x_test.shape == (10000, 3, 32, 32)
            and t.x_train.dtype == torch.uint8)
    assert torch.bincount(t.y_train).tolist() == [5000] * 10 and t.labels[3] == "cat" and t.augment == (Crop(), Flip())
    z = t.normalise(t.x_train[:10000])
    assert z.mean().abs() < .05 and (z.std() - 1).abs() < .05

@needs("cifar-10-batches-py")
def test_cifar10_is_what_torchvision_reads():
    "torchvision unpickles the batches, fedlit lists what they hold."
    from torchvision.datasets import CIFAR10
    theirs, where = CIFAR10(DATA, train=False), DATA/"cifar-10-batches-py"
    ours = readers._pickle_lists((where/"test_batch").read_bytes())
    assert (ours["data"][-1].encode("latin-1") == theirs.data.transpose(0, 3, 1, 2).tobytes()
            and ours["labels"] == theirs.targets)
    assert readers._pickle_lists((where/"batches.meta").read_bytes())["label_names"] == theirs.classes

@needs("MNIST")
def test_mnist():
    t = load("mnist", DATA)
    assert t.x_train.shape == (60000, 1, 28, 28) and t.x_test.shape == (10000, 1, 28, 28) and t.augment == ()
    z = t.normalise(t.x_train)
    assert z.mean().abs() < .001 and (z.std() - 1).abs() < .001

@needs("office_caltech_10")
def test_office():
    t = load("office_caltech10", DATA, size=32)
    assert (t.domains == ("amazon", "caltech", "dslr", "webcam") and t.classes == 10
            and t.x_train.shape[1:] == (3, 32, 32))
    assert torch.bincount(torch.cat([t.domain_train, t.domain_test])).tolist() == [958, 1123, 157, 295]
    assert all(torch.bincount(t.y_test[t.domain_test == d], minlength=10).min() >= 1 for d in range(4))
    assert t.mean is None and torch.equal(t.y_test, load("office_caltech10", DATA, size=8).y_test)

# --- augmentations --------------------------------------------------------------------------------------------------

ALL = [Crop(), Crop(mode="reflect"), Flip(), Rotate(15), AutoAugment()]

@pytest.mark.parametrize("augment", ALL, ids=repr)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_augmentation_laws(augment, dtype, photos):
    x = photos if dtype == torch.uint8 else photos / 255
    a, b = augment.draw((6, 3), gen()), augment.draw((6, 3), gen())
    assert all(torch.equal(a[k], b[k]) and a[k].shape[:2] == (6, 3) and a[k].device.type == "cpu" for k in a)
    flat = {k: v.flatten(0, 1) for k, v in a.items()}
    before = x.clone()
    out = augment(x, flat)
    assert out.shape == x.shape and out.dtype == dtype and torch.equal(x, before) and not torch.equal(out, x)
    assert out.max() <= (255 if dtype == torch.uint8 else 1) and out.min() >= 0
    one = torch.cat([augment(x[i:i + 1], {k: v[i:i + 1] for k, v in flat.items()}) for i in range(18)])
    assert torch.equal(one, out) # an image does not depend on its neighbours
    assert eval(repr(augment)) == augment

def test_crop_against_pad_and_crop(photos):
    d = Crop().draw((18,), gen())
    for mode, pad in (("zero", "constant"), ("reflect", "reflect")):
        big = torch.nn.functional.pad(photos.float(), (4,) * 4, mode=pad).to(torch.uint8)
        want = torch.stack([big[i, :, 4 + d["dy"][i]:36 + d["dy"][i], 4 + d["dx"][i]:36 + d["dx"][i]]
                            for i in range(18)])
        assert torch.equal(Crop(mode=mode)(photos, d), want)
    still = {k: torch.zeros(18, dtype=torch.long) for k in d}
    assert torch.equal(Crop()(photos, still), photos)
    with pytest.raises(ValueError, match="padding=4"): Crop()(torch.zeros(1, 1, 4, 4), {k: v[:1] for k, v in d.items()})
    with pytest.raises(ValueError, match="edge"): Crop(mode="edge")

def test_flip_twice(photos):
    d = Flip().draw((18,), gen())
    assert (torch.equal(Flip()(Flip()(photos, d), d), photos)
            and torch.equal(Flip(1)(photos, Flip(1).draw((18,))), photos.flip(-1)))

def test_rotate_against_torchvision(photos):
    import torchvision.transforms.functional as TF
    d = Rotate(30).draw((18,), gen())
    want = torch.stack([TF.rotate(x, a.item()) for x, a in zip(photos, d["angle"])])
    assert (Rotate(30)(photos, d) != want).float().mean() < 1e-3

def same(ours, theirs, share=1e-3): # equal but for a share of pixels, and there by no more than rounding can do
    return (ours != theirs).float().mean() <= share

MAGNITUDES = dict(
    Brightness=(.25, 1.75, 1.7), Color=(.25, 1.75, .1), Contrast=(.25, 1.75, 1.6), Sharpness=(.25, 1.75, .1),
    Posterize=(5, 8), Solarize=(28., 198.3), Rotate=(-6.67, 20.), ShearY=(-.27, .3),
    TranslateX=(-.4, .45), TranslateY=(-.15, .45), AutoContrast=(0,), Equalize=(0,), Invert=(0,))
OPS = [(op, m) for op, magnitudes in MAGNITUDES.items() for m in magnitudes]

def by_hand(op, m, n):
    return dict(op=torch.tensor([[data._ops.index(op), -1]] * n), magnitude=torch.tensor([[float(m), 0.]] * n))

@pytest.mark.parametrize("op,m", [o for o in OPS if o[0] not in data._reach])
@pytest.mark.parametrize("channels", [3, 1])
def test_ops_against_torchvision(op, m, channels, photos):
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.autoaugment import _apply_op
    x = photos[:, :channels].contiguous()
    theirs = m if op in ("Posterize", "Solarize") else m - 1
    want = torch.stack([_apply_op(i, op, float(theirs), InterpolationMode.NEAREST, None) for i in x])
    got = AutoAugment()(x, by_hand(op, m, len(x)))
    # a factor that float32 holds exactly gives torchvision's levels; others may be a level apart, where the exact
    # blend is a whole number
    if op not in data._enhance or m in (.25, 1.75): assert same(got, want), (got != want).float().mean()
    assert (got.int() - want.int()).abs().max() <= 1

@pytest.mark.parametrize("op,m", [o for o in OPS if o[0] not in data._reach])
def test_ops_against_pil(op, m, photos):
    from PIL import ImageEnhance, ImageOps
    def theirs(x):
        im = Image.fromarray(x.permute(1, 2, 0).numpy())
        level = [m] if op in ("Posterize", "Solarize") else []
        im = (getattr(ImageEnhance, op)(im).enhance(m) if op in data._enhance else
              getattr(ImageOps, op.lower())(im, *level))
        return torch.from_numpy(np.array(im)).permute(2, 0, 1)
    diff = AutoAugment()(photos, by_hand(op, m, len(photos))).int() - torch.stack([theirs(x) for x in photos]).int()
    assert diff.abs().max() <= 1

@pytest.mark.parametrize("op,m", [("Rotate", -15.), ("ShearY", .2), ("TranslateX", .33), ("TranslateY", -.1)])
def test_released_geometry_against_scipy(op, m, photos):
    from scipy import ndimage
    h, a = 32, np.deg2rad(m)
    matrix, shift = np.eye(2), np.zeros(2)
    if op == "Rotate": matrix = np.array([[np.cos(a), -np.sin(a)], [np.sin(a), np.cos(a)]])
    if op == "ShearY": matrix[1, 0] = m
    if "Trans" in op: shift["YX".index(op[-1])] = h * m
    centre = np.full(2, h / 2 + .5)
    want = np.stack([[ndimage.affine_transform(c, matrix, shift + centre - matrix @ centre) for c in x]
                     for x in photos.numpy()])
    got = AutoAugment()(photos, by_hand(op, m, len(photos)))
    assert same(got, torch.from_numpy(want)), (got != torch.from_numpy(want)).float().mean()

def test_autoaugment_frequencies():
    d = AutoAugment().draw((20000,), gen())
    share = torch.bincount(d["op"].flatten() + 1, minlength=14)[1:] / 20000
    want = torch.zeros(13)
    for row in data._policies():
        for op, p, _ in row: want[data._ops.index(op)] += p / 25
    assert (share - want).abs().max() < .015

@pytest.mark.parametrize("size", [(8, 8), (24, 32), (64, 64)])
def test_augmentations_on_other_sizes(size):
    x = torch.randint(256, (40, 1, *size), generator=gen()).to(torch.uint8)
    for a in ALL: assert a(x, a.draw((40,), gen())).shape == x.shape

@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("augment", ALL, ids=repr)
def test_same_on_the_gpu(augment, photos):
    d = augment.draw((18,), gen())
    assert same(augment(photos.cuda(), d).cpu(), augment(photos, d), 2e-3)

# --- recipes --------------------------------------------------------------------------------------------------------

def test_recipes(photos):
    t = Task("cifar100", photos, torch.arange(18), photos, torch.arange(18), classes=100)
    assert (recipe(t, "feddecorr").augment == (Crop(), Flip(), AutoAugment())
            and recipe(t, "moon").augment[-1] == Rotate(15))
    assert recipe(recipe(t, "moon"), "none").augment == ()
    with pytest.raises(ValueError, match="fedbn has no recipe for 'cifar100'; it has one for "
                                         "office_caltech10, domainnet"):
        recipe(t, "fedbn")
    with pytest.raises(ValueError, match="no recipe 'scaffold'"): recipe(t, "scaffold")
    r = recipe(t, "feddecorr")
    draws = [a.draw((18,), gen()) for a in r.augment]
    assert (torch.equal(prepare(r, photos, draws), prepare(r, photos, draws))
            and torch.equal(prepare(r, photos), r.normalise(photos)))
    assert prepare(r, photos, draws).dtype == torch.float32
    with pytest.raises(ValueError, match="1 draws for 3 augmentations"): prepare(r, photos, draws[:1])

@pytest.mark.parametrize('scale', [1, 255.])
def test_means_and_deviations_do_not_depend_on_threads(scale):
    x = torch.randint(256, (3000, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    each, v = [], x if scale == 1 else x/scale
    for n in (1, 2, 3):
        torch.set_num_threads(n)
        each.append(data._stats(v))
    torch.set_num_threads(1)
    assert each[0] == each[1] == each[2]
    true = x.double().div(255).transpose(0, 1).flatten(1)
    assert torch.allclose(torch.tensor(each[0]['mean']).double(), true.mean(1), rtol=1e-6)
    assert torch.allclose(torch.tensor(each[0]['std']).double(), true.std(1, correction=0), rtol=1e-6)
