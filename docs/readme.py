"Write README.md from nbs/index.ipynb: `python docs/readme.py`. What Quarto would do, with nbconvert."
import re
import nbformat
from nbconvert import MarkdownExporter
from nbdev.config import get_config

cfg = get_config()
root, site = cfg.config_path, cfg.doc_host + cfg.doc_baseurl
nb = nbformat.read(root/'nbs/index.ipynb', as_version=4)
nb.cells = [c for c in nb.cells if not re.match(r'#\|\s*(hide|default_exp)\b', c.source)]
for c in nb.cells:
    if c.cell_type == 'code': c.source = '\n'.join(l for l in c.source.splitlines() if not l.startswith('#|'))
body, _ = MarkdownExporter().from_notebook_node(nb)
page = lambda m: '](' + site + '/' + re.sub(r'(^|/)[0-9]+[a-z]?_', r'\1', m[1]) + '.html'
body = re.sub(r'\]\((?!https?:|#)([\w/.-]+?)\.ipynb', page, body)   # pages live on the site
body = re.sub(r'\]\((?!https?:|#)(images/)', r'](nbs/\1', body)
body = re.sub(r'\n{3,}', '\n\n', body).strip()
(root/'README.md').write_text('<!-- Made from nbs/index.ipynb by docs/readme.py: edit there. -->\n\n' + body + '\n')
