"""Execute pages as a reader does who has installed fedlit: each alone, in an empty folder, in a Jupyter kernel.
usage: PYTHON .ci/pages.py [--out FOLDER] PAGE ...; PYTHON has fedlit, nbclient, ipykernel; a page is methods/12_moon"""
import argparse, re, sys, tempfile, time
from pathlib import Path
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = re.compile(r'^#\|\s*(eval: *false|notest)', re.M)      # what nbdev_test passes over, too

def execute(page, out=None):
    "What went wrong, or None."
    nb = nbformat.read(ROOT/'nbs'/f'{page}.ipynb', as_version=4)
    nb.cells = [c for c in nb.cells if c.cell_type != 'code' or not SKIPPED.search(c.source)]
    with tempfile.TemporaryDirectory() as folder:
        kernel = NotebookClient(nb, timeout=900, kernel_name='python3', resources=dict(metadata=dict(path=folder)))
        try: kernel.execute()
        except CellExecutionError as e: return str(e)
        finally: keep(nb, out, page)

def keep(nb, out, page):
    if out is None: return
    to = Path(out)/f'{page}.ipynb'
    to.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, to)

if __name__ == '__main__':
    p = argparse.ArgumentParser()
    p.add_argument('--out', help='folder for the executed pages')
    p.add_argument('pages', nargs='+')
    a = p.parse_args()
    import fedlit
    where, broken = Path(fedlit.__file__).resolve(), 0
    if ROOT in where.parents: sys.exit(f'pages: {sys.executable} has the checkout, {where}; install the wheel')
    for page in a.pages:
        began = time.time()
        wrong = execute(page, a.out)
        broken += wrong is not None
        print(f'pages: {page} {"fails" if wrong else "runs"} in an empty folder, {time.time()-began:.0f} s', flush=True)
        if wrong: print(wrong, flush=True)
    sys.exit(broken > 0)
