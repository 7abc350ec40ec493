"The line that installs fedlit in Colab, after the title of every notebook: `python docs/colab.py` writes it."
import json
import pages

SOURCE = 'git+' + pages.settings()['git_url']
INSTALL = dict.fromkeys(('scale/flower.ipynb', 'guides/real_sites.ipynb'), # notebook -> what it needs instead
                        f'pip install -q "fedlit[flower] @ {SOURCE}"')

def cell(path):
    "Hidden on the site, passed over by nbdev's tests, and without effect outside Colab, which alone has /content."
    line = f'! [ -e /content ] && {INSTALL.get(path, f"pip install -q {SOURCE}")}'
    source = ['#| hide\n', '#| eval: false\n', '# in Colab, run this first\n', *line.splitlines(keepends=True)]
    return dict(cell_type='code', execution_count=None, id='colab', metadata={}, outputs=[], source=source)

def placed(nb, path):
    "The cells of a notebook, with this one after the title."
    cells = [c for c in nb['cells'] if c.get('id') != 'colab']
    title = next(i for i, c in enumerate(cells) if c['cell_type'] == 'markdown')
    return cells[:title+1] + [cell(path)] + cells[title+1:]

def wrong():
    "Notebooks without the cell in its place, and what they should be."
    for path in pages.notebooks():
        nb = pages.read(path)
        if nb['cells'] != (cells := placed(nb, path)): yield path, dict(nb, cells=cells)

if __name__ == '__main__':
    changes = dict(wrong())
    for path, nb in changes.items(): # as nbdev_clean writes it
        (pages.NBS/path).write_text(json.dumps(nb, sort_keys=True, indent=1, ensure_ascii=False) + '\n',
                                    encoding='utf-8')
    print(f'{len(changes)} notebooks changed')
