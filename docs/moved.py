"Pages that have moved: a small page at the old address leads to the new one."
import json
from html import escape
from os.path import dirname, relpath
import pages

# old address -> new address
MOVED = {
    'axes': 'engine/axes',
    'tape': 'engine/tape',
    'table': 'engine/table',
    'numbers': 'engine/guard',
    'files': 'engine/files',
    'speed': 'engine/speed',
    'distributed': 'scale/torchrun',
    'flower': 'scale/flower',
    'costs': 'scale/costs',
    'capacity': 'scale/capacity',
    'domains': 'papers/domains',
    'thesis': 'papers/thesis',
    'experiment': 'papers/settings',
    'catalogue': 'papers/catalogue',
    'reproduce': 'papers/collapse',
}

def site():
    s = pages.settings()
    return s['doc_host'] + s['doc_baseurl']

def target(old):
    "The new page, seen from the old one."
    return relpath(MOVED[old], dirname(old) or '.') + '.html'

def head(old):
    "Leads on at once; with scripts, to the same heading."
    to = escape(target(old))
    return (f'<link rel="canonical" href="{site()}/{MOVED[old]}.html">\n'
            f'<script>location.replace({json.dumps(target(old))} + location.hash)</script>\n'
            f'<meta http-equiv="refresh" content="0; url={to}">')

def write(out):
    "A small page at every old address of the site in `out`."
    for old in MOVED:
        page = out/f'{old}.html'
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Moved</title>\n'
                        f'{head(old)}\n</head>\n<body><p>This page is now at '
                        f'<a href="{escape(target(old))}">{escape(MOVED[old])}</a>.</p></body></html>\n',
                        encoding='utf-8')

def quarto(folder):
    "The same for Quarto: a source at every old address below `folder`, which is in no sidebar."
    for old in MOVED:
        page = folder/f'{old}.qmd'
        page.parent.mkdir(parents=True, exist_ok=True)
        lines = '\n'.join(' '*6 + line for line in head(old).splitlines())
        page.write_text(f'---\ntitle: Moved\nsearch: false\ninclude-in-header:\n  - text: |\n{lines}\n---\n\n'
                        f'This page is now at [{MOVED[old]}]({target(old)}).\n', encoding='utf-8')
