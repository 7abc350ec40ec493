"Made from the rest: a gallery, all names, the papers cited. `python docs/pages.py` writes these pages for Quarto."
import base64, json, re
from configparser import ConfigParser
from html import escape
from pathlib import Path
from unicodedata import normalize
import yaml
import api
from convert import directives, front, page_of, slug

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT/'nbs'
# page -> the function below that makes it
GENERATED = {'gallery': 'gallery', 'api': 'names', 'citations': 'citations'}

def settings():
    parser = ConfigParser(delimiters=['='])
    parser.read(ROOT/'settings.ini', encoding='utf-8')
    return parser['DEFAULT']

def sidebar():
    "`sidebar.yml` as a list of (captions, path), in the order of reading."
    def walk(items, captions):
        for o in items:
            if isinstance(o, str): yield captions, o
            else: yield from walk(o['contents'], (*captions, o['section']))
    return list(walk(
        yaml.safe_load((NBS/'sidebar.yml').read_text(encoding='utf-8'))['website']['sidebar']['contents'], ()))

def notebooks(): return [p for _, p in sidebar() if p.endswith('.ipynb')]

def read(path): return json.loads((NBS/path).read_text(encoding='utf-8'))

def prose(path): return ' '.join(''.join(c['source']) for c in read(path)['cells'] if c['cell_type'] == 'markdown')

def module_of(nb):
    "The module that notebook `nb` makes, such as `methods.moon`, or None."
    return next((d['default_exp'] for c in nb['cells'] if c['cell_type'] == 'code'
                 if 'default_exp' in (d := directives(''.join(c['source']))[0])), None)

def module_file(module): return f"{settings()['lib_path']}/{module.replace('.', '/')}.py"

def entries(path):
    "Public names that the notebook at `path` makes."
    module = module_of(read(path))
    return api.entries((ROOT/module_file(module)).read_text(encoding='utf-8'), module) if module else []

def name_links():
    "Public name -> (its page, its anchor), for names that stand on one page only."
    places = {}
    for p in notebooks():
        for e in entries(p): places.setdefault(e.name, []).append((page_of(p), slug(e.name)))
    return {n: at[0] for n, at in places.items() if len(at) == 1}

# -- papers

def bibliography():
    "The entries of references.bib: key -> (the entry as text, its fields)."
    text = (NBS/'references.bib').read_text(encoding='utf-8')
    texts = {m[1]: m[0].strip() for m in re.finditer(r'@\w+\{([^,\s]+),.*?\n\}', text, re.S)}
    deep = r'[^{}]*(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}[^{}]*)*'      # braces in braces in braces
    return {k: (t, {f: plain(v) for f, v in re.findall(r'(\w+)\s*=\s*\{(' + deep + r')\}', t)})
            for k, t in texts.items()}

ACCENTS = {"'": '\u0301', '"': '\u0308', 'v': '\u030c'}

def plain(value):
    "A BibTeX value as text: accents as letters, without braces."
    accent = lambda m: normalize('NFC', m[2] + ACCENTS[m[1]])
    return re.sub(r'[{}]', '', re.sub(r'\\([\'"v])\{?(\w)\}?', accent, value))

def short(fields):
    "`McMahan et al., 2017`."
    names = [a.split(',')[0].strip() for a in fields['author'].split(' and ')]
    return (names[0] if len(names) == 1 else
            ' and '.join(names) if len(names) == 2 else
            names[0] + ' et al.') + ', ' + fields['year']

def citations(images=None):
    "One heading a paper, named by its key, which is the anchor that pages link to."
    keys = {p: set(re.findall(r'@([\w:-]+)', prose(p))) for p in notebooks()}
    out = ['# Citations\n> Every paper that a page builds on, with BibTeX; and how to cite fedlit']
    out += ['To cite fedlit itself, use `CITATION.cff` in the repository, or:', f'```bibtex\n{own()}\n```']
    for key, (text, f) in sorted(bibliography().items(), key=lambda kv: (kv[1][1]['author'], kv[1][1]['year'])):
        where = f.get('booktitle') or f.get('journal') or f.get('school') or f.get('note') or 'preprint'
        link = f" [{f['url'].split('//')[1]}]({f['url']})." if 'url' in f else ''
        pages = ', '.join(f'[{front(NBS/p)[0]}]({p})' for p in notebooks() if key in keys[p])
        words = (f"{f['author'].replace(' and ', '; ')}. *{f['title']}*. {where}, {f['year']}.{link}"
                 + (f' Used on: {pages}.' if pages else ''))
        out += [f'## {key}', words, f'```bibtex\n{text}\n```']
    return '\n\n'.join(out)

def own():
    s = settings()
    fields = dict(title=f"fedlit: {s['description']}", author='{' + s['author'] + '}', version=s['version'],
                  year=s['copyright'][:4], url=s['git_url'])
    return '@software{fedlit,\n' + ',\n'.join(f'  {k} = {{{v}}}' for k, v in fields.items()) + '\n}'

# -- names

def names(images=None):
    "A table a module: every public name, and the first sentence it says of itself; of internals only the names."
    out = ['# All names\n> Every public function, class and method of the package, by module']
    internals = {p for captions, p in sidebar() if captions[:1] == ('Internals',)}
    for p in notebooks():
        if items := entries(p):
            link = lambda e: f'[`{e.name}`]({p}#{slug(e.name)})'
            first = lambda e: api.cell(api.escape(re.split(r'(?<=[.]) (?=[A-Z`])|\n', e.doc)[0]))
            title, says = front(NBS/p)
            out += [f'## fedlit.{module_of(read(p))}', f'[{title}]({p}): {says}.',
                    ', '.join(map(link, items)) + '.' if p in internals else
                    '| name | what it does |\n|---|---|\n' + '\n'.join(f'| {link(e)} | {first(e)} |' for e in items)]
    return '\n\n'.join(out)

# -- figures

def shown_in(cell):
    """The figures of a cell: (alt text, PNG as base 64 or SVG as text, what it stands on). The last is never typed: the
    cell made it from the settings of the runs and stored it with the picture; '' where it did not."""
    d, _ = directives(''.join(cell['source']))
    return [(d.get('fig-alt', ''), ''.join(o['data'][kind]), o.get('metadata', {}).get('here', ''))
            for o in (() if 'hide' in d else cell['outputs'])
            for kind in ('image/png', 'image/svg+xml') if kind in o.get('data', {})]

def figures(path):
    "The figures of a notebook: (alt text, PNG or SVG, the heading they stand under, what they stand on)."
    heading, out = '', []
    for c in read(path)['cells']:
        if c['cell_type'] == 'markdown':
            heading = ([heading] + re.findall(r'^##+ (.+)', ''.join(c['source']), re.M))[-1]
        elif c['cell_type'] == 'code': out += [(alt, image, heading, here) for alt, image, here in shown_in(c)]
    return out

def command(path):
    """What computes the figures anew: the command that the page names, or running the page. No figure of the site is
    drawn from runs at paper scale, so a command for those is not the one."""
    commands = [c for c in re.findall(r'`((?:fedlit reproduce|python -m fedlit\.[\w.]+)(?: [^`]*)?)`', prose(path))
                if '--scale paper' not in c and '...' not in c]
    return commands[0] if commands else f'jupyter execute nbs/{path}'

def gallery(images):
    "Every figure as a thumbnail that leads to its section, with its data and network; the pictures go to `images`."
    images.mkdir(parents=True, exist_ok=True)
    out = ['# Gallery\n> Every figure of the site, with the page that explains it and the command that draws it']
    for p in notebooks():
        (title, says), cards = front(NBS/p), []
        for i, (alt, picture, heading, here) in enumerate(figures(p)):
            name = f"{page_of(p).replace('/', '-')}-{i}.png"
            if not (svg := picture.startswith('<')): (images/name).write_bytes(base64.b64decode(picture))
            href = page_of(p) + '.html' + ('#' + slug(heading) if heading else '')
            tag = picture if svg else f'<img src="images/gallery/{name}" alt="{escape(alt)}" loading="lazy">'
            caption = (heading or title) + f'. Here: {here}.'*bool(here)
            cards.append(f'<figure><a href="{href}">{tag}</a>'
                         f'<figcaption>{escape(caption, quote=False)}</figcaption></figure>')
        if cards:
            out += [f'## {title}', f'[{says}]({p}), drawn by `{command(p)}`',
                    '<div class="gallery">\n' + '\n'.join(cards) + '\n</div>']
    return '\n\n'.join(out)

def write(folder, suffix, convert=lambda text, name: text):
    "All generated pages into `folder`, the gallery's pictures into `folder`/images/gallery."
    for page, make in GENERATED.items():
        text = convert(globals()[make](folder/'images'/'gallery'), page)
        if suffix == '.md': text = f'---\nnosearch: true\n---\n\n{text}' # lists hold every word, and explain none
        (folder/f'{page}{suffix}').write_text(text, encoding='utf-8')

def front_matter(text, page):
    "Quarto wants the title of a page in front of it."
    return re.sub(r'\A# (.+)\n> (.+)', lambda m: f'---\ntitle: "{m[1]}"\ndescription: "{m[2]}"\n---', text)

if __name__ == '__main__':
    write(NBS, '.qmd', front_matter)
