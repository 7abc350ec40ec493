"From an nbdev notebook to a MyST notebook: what the notebooks use of Quarto's Markdown, and nbdev's directives."
import base64, functools, json, os, re
from html import escape
from pathlib import Path
from tables import rename as named_on_site, set_tables

NBS = Path(__file__).resolve().parent.parent/'nbs'

def page_of(path):
    "The page that notebook or made file `path` becomes, as nbdev names it: `methods/12_moon.ipynb` is `methods/moon`."
    folder, name = os.path.split(path)
    return '/'.join(filter(None, (folder, re.sub(r'^\d+[a-z]?_', '', os.path.splitext(name)[0]))))

def slug(heading):
    "The anchor that Pandoc gives a heading: `The ten hooks` is `the-ten-hooks`."
    words = re.sub(r'[^\w\s.-]', '', heading).lower().split()
    return re.sub(r'^[^a-z_]+', '', '-'.join(words)) or 'section'

def directives(source):
    "The `#|` lines of a cell as a dictionary, and the rest of the cell. A text that is `>-` stands in the lines below."
    lines, options, text = source.splitlines(), {}, None
    while lines:
        if text and (m := re.match(r'#\| {2,}(\S.*)', lines[0])): options[text] = f'{options[text]} {m[1]}'.strip()
        elif m := re.match(r'#\|\s*([\w-]+)\s*:?\s*(.*)', lines[0]):
            text = m[1] if m[2] == '>-' else None
            options[m[1]] = '' if text else m[2].strip().strip('"')
        else: break
        lines.pop(0)
    return options, '\n'.join(lines).strip('\n')

def only_imports(source, many=8):
    "Does a cell consist of so many lines of imports? They are folded."
    lines = source.splitlines()
    return len(lines) >= many and all(re.match(r'(from|import|if TYPE_CHECKING:)\s|\s|#', line) for line in lines)

def unfolded(source):
    "The same cell with every `#|` on one line, as nbdev reads them."
    one = lambda m: f'#| {m[1]}: ' + json.dumps(' '.join(re.findall(r'#\|\s+(.*)', m[2])), ensure_ascii=False) + '\n'
    return re.sub(r'^#\| ([\w-]+): >-\n((?:#\| {2,}.*\n)+)', one, source, flags=re.M)

def prose(text, change):
    "`text` with `change` made outside of code and mathematics."
    parts = re.split(r'(^```.*?^```|^(?: {4}[^\n]*\n?)+|``.+?``|\$\$.+?\$\$|\$[^$\n]+\$)', text, flags=re.S | re.M)
    return ''.join(p if i % 2 else change(p) for i, p in enumerate(parts))

def guard_names(svg):
    "An SVG in whose name and description Sphinx does not mark what was searched for: it cannot, and fails."
    return re.sub('<(title|desc)>', r'<\1 class="nohighlight">', svg)

def inline(output):
    "An output whose SVG names itself becomes part of the page: its text is found by search, its ink is the page's."
    svg = ''.join(output.get('data', {}).get('image/svg+xml', ''))
    return dict(output, data={'text/html': guard_names(svg)}) if '<title>' in svg else output

def entry_anchor(source):
    "What a cell that shows an entry of the catalogue is linked to by, or None."
    m = re.match(r"show\('([\w./-]+)'(?:, '(\w+)')?", source)
    return m and '-'.join(filter(None, (m[1].replace('/', '-'), m[2])))

@functools.cache
def entry_anchors(path):
    "Those of the notebook at `path`."
    cells = json.loads((NBS/path).read_text(encoding='utf-8'))['cells']
    return {entry_anchor(directives(''.join(c['source']))[1]) for c in cells if c['cell_type'] == 'code'} - {None}

PICTURE = re.compile(r'!\[[^\]]*\]\(((?!https?:)[^)\s]+\.svg)\)')

def one_figure_each(cell):
    "A cell as several, the first with the code: what is said of an image's size is said of all images of a cell."
    parts = [[]]
    for o in cell['outputs']:
        if 'image/png' in o.get('data', {}) and any('image/png' in p.get('data', {}) for p in parts[-1]):
            parts.append([])
        parts[-1].append(o)
    def part(k, outputs):
        meta = {**cell['metadata'], 'tags': cell['metadata']['tags'] + ['remove-input']*(k > 0)}
        png = next((''.join(o['data']['image/png']) for o in outputs if 'image/png' in o.get('data', {})), None)
        if 'image' in (mystnb := meta.get('mystnb', {})) and png:
            meta['mystnb'] = {**mystnb, 'image': {**mystnb['image'], **image_options(png)}}
        return {**cell, 'metadata': meta, 'source': cell['source'] if k == 0 else '', 'outputs': outputs}
    return [part(k, outputs) for k, outputs in enumerate(parts)]

LONG = re.compile(r'(?<![\w.])(?<!"\()-?\d+\.\d{8,}(?:e[-+]?\d+)?')

def tidy(text):
    """What a cell has printed, without what only the machine that ran it has to say: addresses, temporary folders,
    the file that a warning came from; a number has six digits, and a warning is given once."""
    digits = lambda m: s if re.search(r'[.e]', s := f'{float(m[0]):.6g}') else f'{s}.0'
    text = re.sub(r'np\.(?:float|int)\d+\(([^()]*)\)', r'\1', text)
    text = re.sub(r' at 0x[0-9a-f]{6,}', '', re.sub(r'/tmp/tmp\w+/', '', text))
    text = re.sub(r'^(?:/|<)\S*:\d+: (\w*Warning: .*\n)  .*\n?', r'\1', text, flags=re.M)
    text = re.sub(r'^[IWE]\d{4} [\d:.]+ \d+ torch/.*\n?', '', text, flags=re.M) # PyTorch's own log
    return LONG.sub(digits, re.sub(r'^(\w*Warning: .*\n)(?:\1)+', r'\1', text, flags=re.M))

def readable(output):
    "An output whose text is tidy and whose tables are set."
    if 'text' in output: return dict(output, text=tidy(''.join(output['text'])))
    data = {k: tidy(''.join(v)) if k == 'text/plain' else set_tables(''.join(v)) if k == 'text/html' else v
            for k, v in output.get('data', {}).items()}
    return dict(output, data=data) if data else output

def merge(outputs):
    "Outputs in which what a stream has said at several times stands together; a warning is then seen to be repeated."
    out = []
    for o in outputs:
        if out and o.get('name') and o.get('name') == out[-1].get('name'):
            out[-1] = dict(out[-1], text=''.join(out[-1]['text']) + ''.join(o['text']))
        else: out.append(o)
    return out

COLUMN = 768 # pixels of a page's column

def shown_width(png, usual=100):
    "How many pixels of a page a PNG (base 64) takes that has not the `usual` dots per inch; else None."
    raw = base64.b64decode(png)
    number = lambda at: int.from_bytes(raw[at:at+4], 'big')
    dpi = .0254*number(at + 4) if (at := raw.find(b'pHYs', 0, 4096)) > 0 else usual
    return round(number(16)*usual/dpi) if abs(dpi - usual) > .02*usual else None

def image_options(png):
    "How a PNG is shown: in its own size, but no wider than the column."
    wide = shown_width(png)
    return {'width': f'{min(wide, COLUMN)}px'} if wide else {}

def text_of(output, kind): return ''.join(output.get('data', {}).get(f'text/{kind}', ''))

def with_setting(outputs):
    """Below a figure, as text, what it stands on, where the cell has kept that with the picture and says it nowhere
    else; of figures in a row that stand on the same, below the last."""
    outputs = [o for o in outputs if not text_of(o, 'markdown').startswith('*Drawn from:*')] # the same, in a notebook
    text = ''.join(text_of(o, kind) for o in outputs for kind in ('markdown', 'html'))
    bases = [o.get('metadata', {}).get('here') for o in outputs]
    for o, here, then in zip(outputs, bases, [*bases[1:], None]):
        yield o
        if here and here != then and here not in text:
            line = f'<p class="here">Drawn from: {escape(named_on_site(here), quote=False)}.</p>'
            yield dict(output_type='display_data', metadata={}, data={'text/html': line})

class Converter:
    "Turns the notebook at `path` into a MyST notebook; links are relative to its page."
    def __init__(self, path, pages, cites=None, names=None):
        self.path, self.pages, self.cites, self.names = path, pages, cites or {}, names or {}
        self.folder, self.imports, self.anchors = os.path.dirname(path), set(), []

    def to(self, target, suffix='.ipynb'):
        "Where `target`, a path from the top of nbs/, is, seen from this page."
        return os.path.relpath(target, self.folder or '.').replace(os.sep, '/') + suffix

    def target(self, url):
        "The path from the top of nbs/ of what `url`, written on this page, leads to."
        return os.path.normpath(os.path.join(self.folder, url)).replace(os.sep, '/')

    def link(self, m):
        url, _, anchor = m[1].partition('#')
        full = self.target(url)
        url = self.to(self.pages[full], '') if full in self.pages else url
        return f"]({url}{'#' + anchor if anchor else ''})"

    def entry(self, m):
        "A link to a cell that shows an entry: Sphinx knows headings only, so it is HTML."
        full = self.target(m[2])
        if full not in self.pages or m[3] not in entry_anchors(full): return m[0]
        return f'<a href="{self.to(page_of(full), ".html")}#{m[3]}">{m[1]}</a>'

    def picture(self, m):
        "A file as `inline` does it with an output; the page's style sheet has what the file says of its colours."
        svg = (NBS/self.folder/m[1]).read_text(encoding='utf-8').strip()
        return re.sub('<style>.*?</style>', '', guard_names(svg)) if '<title>' in svg else m[0]

    def cite(self, m):
        "Authors whose names stand before it are not named again."
        def said(who, _, year): return year if m.string[:m.start()].endswith(f'{who} ') else f'{who}, {year}'
        def link(key, comma, place): # its key, and where in it
            words = said(*self.cites[key].rpartition(', '))
            return f"[{words}]({self.to('citations', '.md')}#{key}){comma}{place}"
        return '(' + '; '.join(link(*k.strip().lstrip('@').partition(',')) for k in m[1].split(';')) + ')'

    def cite_in_formula(self, m): return rf"\text{{({self.cites[m[1]]}{m[2] or ''})}}"

    def name(self, m):
        "Code that names something public as a link; a plain word like `share` only if the page imports it or calls it."
        at = self.names.get(name := re.sub(r'\(.*\)$', '', m[1]))
        if name == m[1] and re.fullmatch('[a-z]+', name) and name not in self.imports: return m[0]
        return f"[`{m[1]}`]({self.to(at[0])}#{at[1]})" if at and at[0] != page_of(self.path) else m[0]

    def clickable(self, output, alt):
        "A picture whose names lead to pages (`link_boxes`), as HTML: a link lies over each. Keys pass these links by."
        if not (links := output.get('metadata', {}).get('links')): return output
        png = ''.join(output['data']['image/png']).strip()
        def over(url, box):
            sides = zip(('left', 'top', 'width', 'height'), map(int, box.split()))
            place = ';'.join(f'{side}:{v/10:g}%' for side, v in sides)
            page = self.target(url)
            return (f'<a href="{self.to(page_of(page), ".html")}" title="{escape(front(NBS/page)[0])}" '
                    f'style="{place}" tabindex="-1" aria-hidden="true"></a>')
        width = image_options(png).get('width', '100%')
        return dict(output, data={'text/html': (
            f'<div class="linked" style="width:{width}"><img alt="{escape(alt)}" src="data:image/png;base64,{png}">'
            + ''.join(over(url, box) for url, boxes in links.items() for box in boxes.split(', ')) + '</div>')})

    def markdown(self, text):
        def change(t):
            t = PICTURE.sub(self.picture, t)
            t = re.sub(r'\[(@[\w:-]+(?:,[^\];]*)?(?:;\s*@[\w:-]+(?:,[^\];]*)?)*)\]', self.cite, t)
            t = re.sub(r'\[[^\]]*\]\([^)]*\)|(?<![`\w])`([\w.]+(?:\([^`\n]*\))?)`(?!`)',
                       lambda m: self.name(m) if m[1] else m[0], t)
            t = re.sub(r'\[([^\[\]]*)\]\(([^)\s#]+\.ipynb)#([^)\s]+)\)', self.entry, t)
            return re.sub(r'\]\((?!https?:|mailto:)([^)\s]*)\)', self.link, t)
        text = re.sub(r'\A(# .+)\n+> (.+)', r'\1\n\n{.lead}\n\2', text)
        text = re.sub(r'\\text\{\[@([\w:-]+)(, [^\]]*)?\]\}', self.cite_in_formula, text)
        return prose(text, change)

    def code(self, cell):
        "The cell as MyST-NB wants it, or None where nothing of it is shown."
        d, source = directives(''.join(cell['source']))
        if 'exports' in d and only_imports(source): d |= {'code-fold': 'true', 'code-summary': 'Imports of the module'}
        if d.keys() & {'hide', 'default_exp', 'export', 'exporti'} or d.get('include') == 'false': return None
        tags = [t for t, on in (('remove-input', d.get('echo') == 'false'), ('exported', 'exports' in d),
                                ('hide-input', d.get('code-fold') == 'true')) if on]
        raw = [] if d.get('output') == 'false' else [o for o in map(readable, merge(cell['outputs']))
                                                       if o.get('text') != '']
        outputs = [dict(inline(self.clickable(o, d.get('fig-alt', ''))), metadata={}) if 'data' in o else o
                   for o in with_setting(raw)]
        for o in outputs:
            if md := o.get('data', {}).get('text/markdown'):
                o['data'] = {'text/markdown': self.markdown(named_on_site(''.join(md)))}
        image = dict(mystnb=dict(image=dict(alt=d['fig-alt']))) if 'fig-alt' in d else {}
        if 'code-summary' in d: image.setdefault('mystnb', {})['code_prompt_show'] = d['code-summary']
        return dict(cell_type='code', execution_count=None, metadata=dict(tags=tags, **image), source=source,
                    outputs=outputs)

    def cell(self, cell):
        if cell['cell_type'] == 'code': return self.code(cell)
        return dict(cell_type='markdown', metadata={}, source=self.markdown(''.join(cell['source'])))

    def linked(self, cell):
        "A cell, behind an anchor where it shows an entry of the catalogue for the first time."
        if cell['cell_type'] != 'code': return [cell]
        name, cells = entry_anchor(cell['source']), one_figure_each(cell)
        if name in (None, *self.anchors): return cells
        self.anchors.append(name)
        return [dict(cell_type='markdown', metadata={}, source=f'<span id="{name}"></span>'), *cells]

    def __call__(self, nb, top='', bottom=''):
        "All cells that are shown; `top` goes under the title, `bottom` to the end."
        source = '\n'.join(''.join(c['source']) for c in nb['cells'] if c['cell_type'] == 'code')
        self.imports = set(re.findall(r'\w+', ' '.join(re.findall(r'import (.+)', source))))
        self.names = {n: at for n, at in self.names.items()
                      if not re.search(rf'\b(?:def|class) {n}\b|^ *{n}\b[^(\n]* = ', source, re.M)}
        cells = [c for old in nb['cells'] if (new := self.cell(old)) for c in self.linked(new)]
        if top: cells[0]['source'] += '\n\n' + top
        if bottom: cells.append(dict(cell_type='markdown', metadata={}, source=bottom))
        return dict(cells=cells, metadata=nb['metadata'], nbformat=4, nbformat_minor=4)

def front(path):
    "Title and subtitle of a notebook."
    text = next(''.join(c['source']) for c in json.loads(Path(path).read_text(encoding='utf-8'))['cells']
                if c['cell_type'] == 'markdown')
    m = re.match(r'# (.+)(?:\n+> (.+))?', text)
    return m[1], m[2] or ''
