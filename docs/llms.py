"""What a language model reads (https://llmstxt.org): `llms.txt` lists the pages, each stands as Markdown beside its
HTML, and `llms-ctx.txt` holds them all. Prose and code as the notebooks have them; outputs and pictures stay out."""
import posixpath, re, tempfile
from functools import cache
from pathlib import Path
from xml.sax.saxutils import quoteattr
import pages
from convert import PICTURE, directives, front, page_of, prose

S = pages.settings()
SITE = S['doc_host'] + S['doc_baseurl']
UNSHOWN = {'hide', 'default_exp'}
LINK = re.compile(r'`[^`\n]*`|\]\((?!https?:|mailto:)([^)\s]*\.(?:ipynb|qmd)(?:#[^)\s]*)?|#[^)\s]*)\)')

def url(path): return f'{SITE}/{page_of(path)}.html'

def links(text, path):
    "Markdown of the page `path` with links to notebooks and made pages as addresses of the site."
    def there(m):
        if m[1] is None: return m[0]    # code
        target, _, anchor = m[1].partition('#')
        full = posixpath.normpath(posixpath.join(posixpath.dirname(path), target)) if target else path
        return f"]({url(full)}{'#' + anchor if anchor else ''})"
    return prose(text, lambda t: LINK.sub(there, PICTURE.sub('', t)))

def cell(c, path):
    "A cell as Markdown, or nothing where the page shows nothing of it."
    source = ''.join(c['source'])
    if c['cell_type'] != 'code': return links(source, path)
    options, code = directives(source)
    if options.keys() & UNSHOWN or options.get('include') == 'false': return ''
    return f'```python\n{code}\n```' if code else ''

@cache
def make(path):
    "A page that docs/pages.py makes; of the gallery, the words."
    with tempfile.TemporaryDirectory() as images:
        text = getattr(pages, pages.GENERATED[page_of(path)])(Path(images))
    text = re.sub(r'<figure>.*?<figcaption>(.*?)</figcaption></figure>', r'- \1', text, flags=re.S)
    return links(re.sub(r'</?div[^>]*>\n?', '', text), path)

def markdown(path):
    "The page `path` of the sidebar as Markdown."
    if not path.endswith('.ipynb'): return make(path)
    return '\n\n'.join(filter(None, (cell(c, path) for c in pages.read(path)['cells'])))

def title(path):
    "Title and subtitle of a page."
    if path.endswith('.ipynb'): return front(pages.NBS/path)
    return re.match(r'# (.+)\n> (.+)', make(path)).groups()

def listing():
    "`llms.txt`: the pages by section, in the order of reading, a line each."
    out, last = [f"# {S['title']}\n\n> {S['description']}",
                 f"Every page is a notebook of {S['git_url']}, from which the package is exported. "
                 f'All pages in one file: {SITE}/llms-ctx.txt'], None
    for captions, path in pages.sidebar():
        if captions != last: out.append('## ' + (': '.join(captions) or 'Start here') + '\n')
        last, (name, says) = captions, title(path)
        out[-1] += f'\n- [{name}]({url(path)}.md): {says}'
    return '\n\n'.join(out) + '\n'

def context():
    "`llms-ctx.txt`: every page between tags that name it."
    docs = ['<doc title={} desc={} url={}>\n{}\n</doc>'.format(*map(quoteattr, (*title(p), url(p))), markdown(p))
            for _, p in pages.sidebar()]
    head = f"<project title={quoteattr(S['title'])} summary={quoteattr(S['description'])}>"
    return '\n\n'.join([head, *docs, '</project>']) + '\n'

def write(folder):
    "All of it into `folder`, the top of the site."
    for _, path in pages.sidebar():
        to = Path(folder)/f'{page_of(path)}.html.md'
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(markdown(path) + '\n', encoding='utf-8')
    for name, text in (('llms.txt', listing()), ('llms-ctx.txt', context())):
        (Path(folder)/name).write_text(text, encoding='utf-8')
