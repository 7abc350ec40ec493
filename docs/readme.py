"Write README.md from nbs/index.ipynb: `python docs/readme.py`. What Quarto would do, with nbconvert."
import re, sys
from pathlib import Path
import nbformat
from nbconvert import MarkdownExporter
sys.path.insert(0, str(Path(__file__).parent))
from convert import PICTURE, directives, page_of
from pages import ROOT, settings

cfg = settings()
site = cfg['doc_host'] + cfg['doc_baseurl']
nb = nbformat.read(ROOT/'nbs/index.ipynb', as_version=4)
cells = [directives(c.source) if c.cell_type == 'code' else ({}, c.source) for c in nb.cells]
nb.metadata['language_info'] = dict(name='python') # of the fences
nb.cells = [nbformat.NotebookNode(c, source=s if d.get('echo') != 'false' else '')
            for c, (d, s) in zip(nb.cells, cells) if 'hide' not in d]
for c in nb.cells:
    for o in c.get('outputs', ()): # what moves on the site is a picture here
        if 'image/png' in o.get('data', {}): o['data'].pop('text/html', None)
body, resources = MarkdownExporter().from_notebook_node(nb)
alts = [d['fig-alt'] for d, _ in cells if 'fig-alt' in d]
# figures become files
for i, (alt, (name, image)) in enumerate(zip(alts, sorted(resources['outputs'].items()), strict=True)):
    (ROOT/'nbs/images'/f'index-{i}.png').write_bytes(image)
    body = re.sub(rf'!\[\w*\]\({name}\)', f'![{alt}](images/index-{i}.png)', body)
body = re.sub(r'```\w*\s+```\n', '', body)                          # what is left of a cell whose code is not shown
says = lambda m: f"![{re.search('<desc>(.*?)</desc>', (ROOT/'nbs'/m[1]).read_text(encoding='utf-8'))[1]}]({m[1]})"
body = PICTURE.sub(says, body)
page = lambda m: f"]({site}/{page_of(m[1])}.html"
body = re.sub(r'\]\((?!https?:|#)([\w/.-]+?)\.(?:ipynb|qmd)', page, body)   # pages live on the site
body = re.sub(r'\]\((?!https?:|#)(images/)', r'](nbs/\1', body)
body = re.sub(r'\n{3,}', '\n\n', re.sub(r'^ +$', '', body, flags=re.M)).strip()
(ROOT/'README.md').write_text('<!-- Made from nbs/index.ipynb by docs/readme.py: edit there. -->\n\n' + body + '\n',
                              encoding='utf-8')
