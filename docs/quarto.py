"All that `nbdev_docs` does before it calls Quarto: `python docs/quarto.py`. A cell that stops it is named."
import os, warnings
from pathlib import Path
from nbdev.quarto import refresh_quarto_yml
from nbdev.serve import proc_nbs
import nbdev.process
import pages
from convert import unfolded

read = nbdev.process.extract_directives

def extract_directives(cell, *args, **kw):
    if cell.cell_type == 'code': cell['source'] = unfolded(cell.source)
    return read(cell, *args, **kw)

if __name__ == '__main__':
    os.chdir(pages.ROOT)
    nbdev.process.extract_directives = extract_directives # which would drop all but the first line of a text
    warnings.filterwarnings('ignore', 'Found cells containing imports')   # they are run, and that is tried here
    pages.write(pages.NBS, '.qmd', pages.front_matter)
    refresh_quarto_yml()
    folder = proc_nbs(force=True, n_workers=0)
    missing = [p for _, p in pages.sidebar() if not (Path(folder)/p).exists()]
    assert not missing, f'{folder} has no {missing}'
    print(f'{folder}: {len(pages.sidebar())} pages, as Quarto takes them')
