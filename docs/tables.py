"""Tables as pandas writes them, set for a page: one row of headings, text on the left, numbers on the right and no
longer than they can be read, no row numbers, a dash for what is not there. Notebooks keep what pandas wrote."""
import math, re
from html import escape, unescape
from xml.etree import ElementTree

NUMBER = r'[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[-+]?\d+)?'
UNIT = r'(?:%|pp|k|M|G|s|ms|MB|KiB|MiB|GiB)'
ONE = rf'(?:[-+≤≥<>~]?\s*{NUMBER}|inf|-inf)\s*{UNIT}?(?: \(n=\d+\))?'
# 54.9 ± 26.7, +0.51 to +2.3, 3/10, [1, 2]
SEVERAL = re.compile(rf'[\[(]?{ONE}(?:\s*(?:±|to|/|\||,|-|–|\.\.)\s*{ONE})*[\])]?')
MISSING = {'NaN', 'nan', 'None', '<NA>', 'NaT', ''}
DASH, WORDS = '–', 40 # characters from which a cell is a sentence, which wants room
MANY = 7 # columns, from which they stand closer

# what is a label in the runs, and has another name on the site; runs are found by theirs
NAMES = {'small_cifar10': 'CIFAR-10 (small)'}

def rename(html): return re.sub(rf"\b({'|'.join(NAMES)})\b", lambda m: NAMES[m[1]], html)

def rows_of(html, part):
    "The rows of a table's 'thead' or 'tbody', each a list of [is it a heading?, inner HTML, rows, columns]."
    def inner(c):
        return rename(escape(c.text or '', False) + ''.join(ElementTree.tostring(e, encoding='unicode') for e in c))
    return [[[c.tag == 'th', inner(c), int(c.get('rowspan', 1)), int(c.get('colspan', 1))] for c in row]
            for row in ElementTree.fromstring(f'<table>{html}</table>').iterfind(f'{part}/tr')]

def text(html): return unescape(re.sub('<[^>]*>', '', html)).strip()

def place(rows):
    "Column -> cell of every row, with cells that reach over several rows and columns where they begin."
    out, full = [], set()
    for i, row in enumerate(rows):
        places, j = {}, 0
        for cell in row:
            while (i, j) in full: j += 1
            places[j] = cell
            full |= {(i + a, j + b) for a in range(cell[2]) for b in range(cell[3])}
        out.append(places)
    return out

def digits(number): return len(re.sub(r'e.*|[-+.,]', '', number).strip('0'))

def decimals(values):
    "How many a column of numbers of this size is given."
    most = max((abs(v) for v in values if math.isfinite(v)), default=0)
    return 3 if most < 10 else 1 if most < 1000 else 0

def shorter(column):
    "The cells of a column with no more decimals than are read, unless somebody has chosen for each how many it has."
    plain = [re.fullmatch(NUMBER, c.replace(',', '')) is not None for c in column]
    numbers = [c.replace(',', '') for p, c in zip(plain, column) if p]
    behind = [len(re.sub('e.*', '', n).partition('.')[2]) for n in numbers]
    values = [float(n) for n in numbers]
    if not all(p or c in MISSING for p, c in zip(plain, column)): # names and numbers: what was asked for, say
        return [re.sub(r'\.0$', '', c) if p else c for p, c in zip(plain, column)]
    if max(behind, default=0) == 0: # whole ones
        new = [f'{int(n):,}' if 'e' not in n else n for n in numbers] if any(v >= 1e4 for v in values) else numbers
    elif max(behind) < 3 or len({*behind}) > 1 and max(behind) < 5: return column
    else:
        bare = [f'{v:.6f}'.rstrip('0').rstrip('.') if 1e-6 <= abs(v) < 1e6 else format_number(v, 1) for v in values]
        few = max(behind) > 3 and all(digits(n) <= 3 and '.' in n or v == int(v) for n, v in zip(bare, values))
        new = bare if few else [format_number(v, decimals(values)) for v in values] # few: rates such as 0.0625
    rest = iter(new)
    return [next(rest) if p else c for p, c in zip(plain, column)]

def format_number(value, decimals):
    tiny, huge = value and abs(value) < 10**-decimals/2, abs(value) >= 1e7
    return f'{value:.2g}' if tiny or huge else f'{value:.{decimals}f}'

def headings(rows, index):
    "pandas' rows of headings in as few as say the same: (rows, with the names of the index among them)."
    rows = [[*row] for row in rows]
    width = lambda row: sum(c[3] for c in row)
    names = None
    if len(rows) > 1 and not any(text(c[1]) for c in rows[-1][index:]): names = rows.pop()[:index]
    over, out = [], []
    for row in rows:
        lead, k = [], 0
        while k < index: # a level's name stands in the last cell over the index
            lead.append(row.pop(0))
            k += lead[-1][3]
        name = next((c[1] for c in reversed(lead) if text(c[1])), '')
        blank = [[True, '', 1, 1] for _ in range(index)]
        if text(name) and names is None and len(rows) == index == 1: blank[0][1] = name # nothing else stands there
        elif text(name): over.append([*blank, [True, name, 1, width(row)]])
        out.append([*blank, *row])
    if names: out[-1][:index] = names
    return over + out

def is_count(body, head, columns, index):
    "Does a nameless index only count the rows, or say again what a column says?"
    first = [text(c[1]) for c in columns[0]]
    if index != 1 or any(text(c[1]) for row in head for c in row[:1]) or not all(map(str.isdigit, first)): return False
    if [text(c[1]) for c in head[-1][1:]] == [str(k) for k in range(len(head[-1]) - 1)]: return False # a matrix
    n = [int(f) for f in first]
    again = any([text(c[1]) for c in columns[j]] in (first, [str(k + 1) for k in n]) for j in columns if j)
    return n == [*range(len(n))] or again or max(n) >= 1000 or len({*n}) < len(n) or n[0] == 0 and n == sorted(n)

def important(name):
    "What a reader looks for comes first: the verdict on a claim, and beside our number that of the paper."
    first = 'verdict', 'ours|margin', '(paper|Flower|sd),.*'
    return next((k for k, form in enumerate(first) if re.fullmatch(form, name)), len(first))

def order(head, index):
    "The columns in the order of the page; those of the index, and what stands before the first result, stay."
    names = [text(c[1]) for c in head[-1]]
    if len(head) > 1 or not {'verdict', 'ours'} & {*names[index:]}: return range(sum(c[3] for c in head[-1]))
    first = next(j for j, n in enumerate(names) if j >= index and n in ('verdict', 'measured', 'ours'))
    return [*range(first), *sorted(range(first, len(names)), key=lambda j: important(names[j]))]

def breakable(html):
    "A long word such as classes_per_client(classes=2) may be broken after its first part, where a table is too wide."
    if '<' in html: return html
    return re.sub(r'\S{16,}', lambda m: re.sub(r'(?<=[(/+])(?=\w)', '<wbr>', m[0]), html)

def cell(c, tag, style=''):
    spans = ''.join(f' {n}="{v}"' for n, v in (('rowspan', c[2]), ('colspan', c[3])) if v > 1)
    return f'<{tag}{spans}{style}>{breakable(c[1])}</{tag}>'

def set_table(html):
    "One table of pandas, set."
    body, head = rows_of(html, 'tbody'), rows_of(html, 'thead')
    if not body or not head: return html
    index = next((k for k, c in enumerate(body[0]) if not c[0]), len(body[0]))
    head = headings(head, index)
    at, columns = place(body), {}
    for row in at:
        for j, c in row.items(): columns.setdefault(j, []).append(c)
    right, wordy, count = {}, set(), is_count(body, head, columns, index)
    for j, cells in sorted(columns.items()):
        texts = [text(c[1]) for c in cells]
        for c, new, old in zip(cells, shorter(texts), texts):
            if new != old: c[1] = new
            if not c[0] and old in MISSING: c[1] = DASH
        there = [s for s in texts if s not in MISSING]
        if max(map(len, texts)) > WORDS: wordy.add(j)
        right[j] = bool(there) and j >= index and all(SEVERAL.fullmatch(s) for s in there)
    if count:
        for row in body + head: row.pop(0)
        right, wordy = {j - 1: r for j, r in right.items() if j}, {j - 1 for j in wordy}
        at, index = place(body), 0
    columns = order(head, index)
    side = lambda j: ' class="number"' if right.get(j) else ' class="words"' if j in wordy else ''
    line = lambda row, tag, over='': '<tr>' + ''.join(
        cell(c, tag if not c[0] else 'th', over if over and c[3] > 1 else side(j))
        for j in columns if (c := row.get(j))) + '</tr>'
    top = [line(row, 'th', ' class="over"') for row in place(head)]
    kind = 'dataframe many' if len(columns) > MANY else 'dataframe'
    return '\n'.join([f'<table class="{kind}">', '<thead>', *top, '</thead>', '<tbody>',
                      *(line(row, 'td') for row in at), '</tbody>', '</table>'])

def set_tables(html):
    "Every table of pandas in an output, set."
    form = (r'(?:<div>\s*(?:<style scoped>.*?</style>\s*)?)?<table border="1" class="dataframe">(.*?)</table>'
            r'(?:\s*<p>\d+ rows × \d+ columns</p>)?(?:\s*</div>)?')
    html = re.sub(r'<table (?:id="T_|class="sentences").*?</table>', lambda m: rename(m[0]), html, flags=re.S) # by hand
    html = re.sub(form, lambda m: set_table(m[1]), html, flags=re.S)
    return re.sub('(?<=</t[dh]>)(?=<t[dh])', ' ', html) # else Sphinx's search joins what two cells say to a word
