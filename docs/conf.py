"Sphinx's settings for docs/build.py."
import importlib.util, json, re, shutil, sys
from html import escape
from urllib.parse import quote
from pathlib import Path
from docutils import nodes
sys.path.insert(0, str(Path(__file__).parent))
import yaml
import pages
from convert import page_of, slug

s = pages.settings()
project, release = s['title'], s['version']
html_title = f'{project} {release}'
LOGO = 'data:image/svg+xml,' + quote((pages.NBS/'images'/'logo.svg').read_text(encoding='utf-8'))

ASKED = yaml.safe_load((Path(__file__).parent/'asked.yml').read_text(encoding='utf-8'))
SMALL = 'a an and are at by can custom do does for how i in is it my of on own the to use what which with'.split()

def scorer():
    "search.js with the pages of the guides and of the internals in it, what the recipes are for, and asked.yml."
    places = {name: [page_of(p) for captions, p in pages.sidebar() if captions[:1] == (chapter,)]
              for name, chapter in (('guides', 'Guides'), ('internals', 'Internals'))}
    places['guides'] += [page_of(p) for _, p in pages.sidebar() if p.startswith('guides/seven')]
    cells = pages.read('guides/recipes.ipynb')['cells']
    places['recipes'] = [''.join(c['source']).partition('## ')[2].partition('\n')[0] for c in cells if '## ' in
                         ''.join(c['source']) and c['cell_type'] == 'markdown']
    places.update(asked=ASKED, small=SMALL)
    text = (Path(__file__).parent/'search.js').read_text(encoding='utf-8')
    file = pages.ROOT/'_proc'/'search.js'
    file.parent.mkdir(exist_ok=True)
    file.write_text(re.sub(r'(?<=chapters = ){.*}', lambda m: json.dumps(places), text), encoding='utf-8')
    return str(file)

html_search_scorer = scorer()
language, author = 'en', s['author']
extensions = ['myst_nb', 'sphinx.ext.mathjax', 'sphinx_copybutton']
exclude_patterns = ['_extra']
nb_execution_mode, nb_merge_streams, nb_render_markdown_format = 'off', True, 'myst'
nb_code_prompt_show, nb_code_prompt_hide = 'Code', 'Hide the code'
myst_enable_extensions = ['amsmath', 'attrs_block', 'dollarmath']
myst_heading_anchors, myst_heading_slug_func = 4, 'convert.slug'
myst_dmath_double_inline = True
mathjax_path = 'tex-svg-full.js'    # one file, glyphs included: no fonts to fetch, so it works from file://
mathjax3_config = dict(svg=dict(fontCache='none'))
copybutton_selector = 'div.cell_input pre, div.highlight-python pre, div.highlight-bash pre, div.highlight-toml pre'
html_theme = 'furo'
html_theme_options = dict(source_repository=s['git_url'], source_branch=s['branch'], source_directory='nbs/',
                          top_of_page_buttons=[])
templates_path, html_last_updated_fmt = ['_templates'], '%Y-%m-%d'
html_static_path, html_css_files, html_js_files = ['_static'], ['site.css'], ['site.js']
html_extra_path = [str(pages.ROOT/'_proc'/'_sphinx'/'_extra')]
html_copy_source = html_show_sphinx = html_use_index = False
html_show_copyright = False

def anchors(app, doctree):
    "The anchors Quarto gives: none for the title, Pandoc's for all other headings; names of the reference come first."
    title, *rest = doctree.findall(nodes.section)
    ids = title['ids'][:] = ['title']
    names = [x for x in rest if x.parent[0].astext() == 'Reference']
    for x in names + [x for x in rest if x not in names]:
        new = old = slug(x[0].astext())
        n = 0
        while new in ids:
            n += 1
            new = f'{old}-{n}'
        ids.append(new)
        x['ids'] = [new] + [i for i in x['ids'] if i not in ids]

def keywords(app, doctree):
    "The words of asked.yml as the page's keywords, which the search knows like those of its text."
    if phrases := ASKED.get(app.env.docname):
        words = sorted({*SMALL, *re.findall(r'[\w-]+', ' '.join(phrases))})
        doctree.append(nodes.meta(name='keywords', content=', '.join(words)))

def previews(app, page, template, context, doctree):
    "The logo, and what a link to the page shows where it is posted: its title, and the line under it."
    icon = f'<link rel="icon" href="{LOGO}"><style>:root {{ --logo: url("{LOGO}") }}</style>'
    context['metatags'] = context.get('metatags', '') + f'\n{icon}'
    if doctree is None: return
    lead = lambda n: isinstance(n, nodes.Element) and 'lead' in n.get('classes', ())
    line = next((n.astext() for n in doctree.findall(lead)), s['description'])
    tag = lambda key, name, text: f'<meta {key}="{name}" content="{escape(" ".join(text.split()))}">'
    context['metatags'] += '\n'.join(['', tag('name', 'description', line), tag('property', 'og:description', line),
                                      tag('property', 'og:title', context['title'] or project),
                                      tag('property', 'og:type', 'article')])

def mathjax(app, exc):
    "The one file of MathJax that pages load, out of 24 MB."
    if exc: return
    where = Path(importlib.util.find_spec('sphinx-mathjax-offline').origin).parent/'static'/'mathjax'
    shutil.copy(where/mathjax_path, Path(app.outdir)/'_static')

def setup(app):
    app.connect('doctree-read', anchors, priority=100)
    app.connect('doctree-read', keywords)
    app.connect('html-page-context', previews)
    app.connect('build-finished', mathjax)
