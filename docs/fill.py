"""Runs pages and stores what they show: `python docs/fill.py nbs/14_figure.ipynb ...`. Figures get at most twice the
pixels of a page's column, and few colours, so they are sharp and small; a table is stored once, without pandas' style;
a cell that is edited in the meantime keeps what it had."""
import base64, io, os, re, sys, time
import nbformat, zopfli.png
from nbclient import NotebookClient
from PIL import Image, ImageChops, ImageStat

COLOURS, WIDEST = (24, 48), 1520 # the fewest that nobody sees the difference of; pixels
TWICE = ['--InlineBackend.figure_formats={"retina"}']

def fewer(png):
    "The picture `png` (base 64) in few colours, on white, where that makes it smaller."
    raw = base64.b64decode(png)
    with Image.open(io.BytesIO(raw)) as image:
        dpi, whole = image.info.get('dpi', (100, 100)), image.convert('RGBA')
    white, out = Image.new('RGBA', whole.size, 'white'), io.BytesIO()
    flat = Image.alpha_composite(white, whole).convert('RGB')
    if (part := WIDEST/flat.width) < 1:
        flat, dpi = flat.resize((WIDEST, round(part*flat.height))), tuple(part*d for d in dpi)
    for many in COLOURS:
        few = flat.quantize(many, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        if max(ImageStat.Stat(ImageChops.difference(few.convert('RGB'), flat)).mean) < 2: break # of 255
    few.save(out, 'png', dpi=dpi)
    small = zopfli.png.optimize(out.getvalue(), keepchunks=['pHYs']) # a sixth less than Pillow's best, in a second
    return base64.b64encode(min(raw, small, key=len)).decode()

def lean(output):
    """A table of pandas as HTML alone, on one line and without the style that comes with each; a warning without the
    file of this machine that it points at."""
    if 'text' in output: output['text'] = re.sub(r'^/\S+\.py:\d+: (?=\w+Warning: )', '', output['text'], flags=re.M)
    html = output.get('data', {}).get('text/html', '')
    if 'class="dataframe"' not in html: return
    table = re.sub(r'<style scoped>.*?</style>', '', html, flags=re.S)
    output['data'] = {'text/html': re.sub(r'>\s+<', '><', table).strip()}

def ran(nb, folder):
    "What the cells show, by their ids. Those that are not to be run are left out."
    nb.cells = [c for c in nb.cells if not re.search(r'^#\|\s*eval:\s*false', c.source, re.M)]
    client = NotebookClient(nb, timeout=1800, kernel_name='python3', coalesce_streams=True,
                            resources={'metadata': {'path': folder}})
    client.extra_arguments = TWICE
    client.execute()
    for c in nb.cells:
        for o in c.get('outputs', ()):
            lean(o)
            if 'image/png' in o.get('data', {}): o['data']['image/png'] = fewer(o['data']['image/png']) + '\n'
    return {c.id: c for c in nb.cells if c.cell_type == 'code'}

def fill(path):
    new, nb = ran(nbformat.read(path, 4), os.path.dirname(path) or '.'), nbformat.read(path, 4)
    for c in nb.cells:
        if c.cell_type == 'code' and c.id in new and new[c.id].source == c.source: c.outputs = new[c.id].outputs
    nbformat.write(nb, path)

if __name__ == '__main__':
    for path in sys.argv[1:]:
        began = time.monotonic()
        fill(path)
        print(path, f'{time.monotonic() - began:.0f} s', flush=True)
