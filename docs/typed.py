"""Results typed into prose: `python docs/typed.py` lists them, page[cell]: words, and ends with 1 where there are any.

A number that a run produced is displayed by a cell or read from `results/`; typed, it is wrong on another machine.
So Markdown, and the words beside a figure, hold no decimals of two places, no percentages, no numbers with a unit
(`six points`, `half a minute`), no shares (`nine of ten`) and no `a ± b`, in digits or in words. Code, formulas,
targets of links, and numbers behind the name of a setting (`alpha 0.05`, `torch 2.6`) or of a place (`Table 3.4`)
are not looked at, nor are numbers that the page's own code sets. What else is no result of a run is listed in
`docs/typed.txt`, a line each: `page | words ... of the sentence | reason`. Its reasons are `setting`, `definition`,
`published` and `arithmetic`, and a line that nothing needs is an error too.
"""
import json, re, sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
from convert import directives

NBS, ALLOWED = Path(__file__).resolve().parent.parent/'nbs', Path(__file__).with_suffix('.txt')
REASONS = 'setting', 'definition', 'published', 'arithmetic'

_words = [*'one two three four five six seven eight nine ten eleven twelve'.split(),
          *(w + 'teen' for w in 'thir four fif six seven eigh nine'.split()),
          *'twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million dozen'.split()]
WORD = rf'(?:{"|".join(sorted(_words, key=len, reverse=True))})'
COUNT = rf'(?:\d+(?:,\d{{3}})*|\b(?:an? )?{WORD}(?:[ -]{WORD})*\b)'
NUM = rf'(?:[-+]?{COUNT}(?:\.\d+)?|\.\d+)'
PART = r'(?:half|(?:an? |one |two |three |four )?(?:third|quarter|fifth|tenth)s?)'
UNIT = (r'(?:%|per ?cent\b|points?\b|times\b|-?fold\b|s\b|ms\b|µs\b|(?:milli|micro|nano)?seconds?\b'
        r'|minutes?\b|hours?\b|[kKMGT]i?B\b)')
MORE = (r'(?:as (?:much|many|far|fast|good|long|large|small)|better|worse|faster|slower|longer|shorter'
        r'|higher|lower|ahead|behind|more|fewer)')
NAMED = (r'\b(?:alpha|beta|momentum|learning rates?|weight decay|Dirichlet|torch|Python|version'
         rf'|Tables?|Figs?\.|Figures?|sections?)(?: of| at| is)?(?: {NUM},?(?: and| or| to)?)+')
FINDS = {
    'spread': re.compile(r'\d[\d.]*\s*(?:±|\+-|\\pm)\s*\d[\d.]*'),
    'unit': re.compile(rf'(?<![\w.$=^-]){NUM}(?:\s*(?:to|and|or|-|–)\s*{NUM}| and a half)*[\s\\-]*{UNIT}', re.I),
    'part': re.compile(rf'\b(?:{PART} (?:of )?an? (?:second|minute|hour)\b|{PART} {MORE}\b'
                       rf'|by (?:about )?{PART}\b|(?:about|nearly) (?:two|three|four) (?:third|quarter|fifth)s\b'
                       rf'|by (?:about|nearly|more than) {COUNT}\b)', re.I),
    'share': re.compile(rf'(?<![\w.])(?!one of){COUNT} (?:out of|of|in) (?:the )?(?!one\b){COUNT}\b', re.I),
    'decimal': re.compile(r'(?<![\w.$=/^-])[-+]?\d*\.\d{2,}(?![\w.]*\.\d)(?!\w)'),
}

def plain(text):
    "The prose of a cell, without code, targets of links and formulas; a formula that is a plain number stays."
    text = re.sub(r'```.*?```|<!--.*?-->|\$\$.*?\$\$', '\n', text, flags=re.S)
    text = re.sub(r'^(?: {4,}|\t)(?![-*\d]).*$', '', text, flags=re.M)
    text = re.sub(r'`[^`\n]*`', 'code', text)
    text = re.sub(r'\$(\d[\d.,]*(?:\s*\\pm\s*\d[\d.,]*)?)\$', r'\1', text)
    text = re.sub(r'95 % (?=intervals?\b|\[)', '', text) # which is the one of `fedlit.papers.evidence` everywhere
    return re.sub(r'\]\([^)\s]*\)|<[^>\n]*>', ']', re.sub(r'\$[^$\n]*\$', 'formula', text))

def found(text):
    "(kind, words, sentence) of every typed number in Markdown."
    for s in (s for line in plain(text).splitlines() for s in re.split(r'(?<=[.!?]) +(?=[A-Z*(\["])', line)):
        spans, bare = [], re.sub(NAMED, lambda m: ' '*len(m[0]), s)
        for kind, form in FINDS.items():
            for m in form.finditer(bare if kind == 'decimal' else s):
                if not any(a < m.end() and m.start() < b for a, b in spans): yield kind, m, s
                spans.append(m.span())

def prose(cell):
    "What a cell says: all of Markdown, and of code the words beside its figure."
    text = ''.join(cell['source'])
    return text if cell['cell_type'] == 'markdown' else directives(text)[0].get('fig-alt', '')

def numbers(text): return {float(n.replace(',', '')) for n in re.findall(r'\d[\d,]*(?:\.\d+)?|\.\d+', text)}

def settings(cells):
    "The numbers in the code of a page."
    code = '\n'.join(''.join(c['source']) for c in cells if c['cell_type'] == 'code')
    literals = re.findall(r'(?<![\w.])(?:\d[\d_]*\.?\d*|\.\d+)(?:e-?\d+)?', re.sub(r'#.*|(["\']).*?\1', '', code))
    return {float(n) for n in literals}

def allowed(text):
    "(page, words) of every line of `typed.txt`; False until something needs it."
    lines = [[p.strip() for p in o.split('|')] for o in text.splitlines() if o and o[0] != '#']
    for o in lines:
        if len(o) != 3 or o[2] not in REASONS:
            raise ValueError(f"{o}, but a line is page | words | one of {', '.join(REASONS)}")
    return {(p, w): False for p, w, _ in lines}

def covers(words, m, s):
    "Do these words, in which `...` stands for any others, hold the match?"
    form = '.*?'.join(re.escape(w.strip()) for w in words.split('...'))
    return any(a.start() <= m.start() and m.end() <= a.end() for a in re.finditer(form, s))

def check(nbs=NBS, lines=None):
    "What stands in the notebooks below `nbs` and should not, and lines of `typed.txt` that nothing needs."
    if lines is None: lines = allowed(ALLOWED.read_text(encoding='utf-8'))
    wrong = []
    for path in sorted(p for p in Path(nbs).rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts):
        page = path.relative_to(nbs).with_suffix('').as_posix()
        cells = json.loads(path.read_text(encoding='utf-8'))['cells']
        set_here = settings(cells)
        for i, (kind, m, s) in ((i, hit) for i, c in enumerate(cells) for hit in found(prose(c))):
            if numbers(m[0]) and numbers(m[0]) <= set_here: continue
            fits = [k for k in lines if k[0] == page and covers(k[1], m, s)]
            lines.update(dict.fromkeys(fits, True))
            around = f'{s[max(0, m.start()-40):m.start()]}»{m[0]}«{s[m.end():m.end()+40]}'
            if not fits: wrong.append(f'{page}[{i}]: {around} ({kind})')
    return wrong + [f'{ALLOWED.name}: nothing needs {p} | {w}' for (p, w), need in lines.items() if not need]

if __name__ == '__main__':
    wrong = check()
    print('\n'.join(wrong) or 'typed: no result is typed into prose')
    sys.exit(bool(wrong))
