"The site without Quarto: `python docs/build.py [OUT]`. Reads notebooks as they are, runs nothing, needs no network."
import argparse, json, os, shutil, sys
from pathlib import Path
from sphinx.cmd.build import main
import llms, pages
from convert import Converter, page_of
from api import markdown as reference

def links(path, s):
    "Where a reader can run the page."
    there = '/'.join((s['user'], s['repo'], 'blob', s['branch'], 'nbs', path))
    return (f'<p class="nb-links"><a class="colab" '
            f'href="https://colab.research.google.com/github/{there}">Open in Colab</a> '
            f'<a href="{os.path.basename(path)}" download>Download the notebook</a> <code>nbs/{path}</code></p>')

def toctrees():
    "The sidebar as Sphinx wants it: a hidden list a caption; site.js puts 'Methods / Aggregation' into 'Methods'."
    lists = {}
    for captions, path in pages.sidebar():
        if path != 'index.ipynb': lists.setdefault(' / '.join(captions), []).append(page_of(path))
    return '\n\n'.join('\n'.join(['```{toctree}', ':hidden:', f':caption: {c}', '', *ps, '```'])
                       for c, ps in lists.items())

def write(src):
    "Sphinx's sources into `src`, the notebooks as they are beside their pages into `src`/_extra."
    shutil.rmtree(src, ignore_errors=True)
    s, cites, names = (pages.settings(), {k: pages.short(f) for k, (_, f) in pages.bibliography().items()},
                       pages.name_links())
    targets = {p: page_of(p) + '.ipynb' for p in pages.notebooks()} | {f'{p}.qmd': f'{p}.md' for p in pages.GENERATED}
    for p in pages.notebooks():
        nb, out, raw = pages.read(p), src/targets[p], src/'_extra'/p
        for f in (out, raw): f.parent.mkdir(parents=True, exist_ok=True)
        items = pages.entries(p)
        url = f"{s['git_url']}/blob/{s['branch']}/{pages.module_file(pages.module_of(nb))}" if items else ''
        bottom = '\n\n'.join(filter(None, (reference(items, url) if items else '',
                                           toctrees() if p == 'index.ipynb' else '')))
        out.write_text(json.dumps(Converter(p, targets, cites, names)(nb, links(p, s), bottom)), encoding='utf-8')
        shutil.copy(pages.NBS/p, raw)
    pages.write(src, '.md', lambda text, page: Converter(page, targets, cites, names).markdown(text))
    shutil.copytree(pages.NBS/'images', src/'images', dirs_exist_ok=True)
    shutil.copytree(src/'images'/'gallery', src/'_extra'/'images'/'gallery')
    llms.write(src/'_extra')

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('out', nargs='?', type=Path, help='a folder, which is replaced; _docs without it')
    folder = parser.parse_args().out
    if folder and folder.exists() and not (folder/'objects.inv').exists():
        sys.exit(f'{folder} is there and is no site, so it is not replaced; name another folder')
    out = folder or pages.ROOT/'_docs'
    src = pages.ROOT/'_proc'/'_sphinx'
    write(src)
    html = src.parent/'html'
    for old in (out, html): shutil.rmtree(old, ignore_errors=True)
    options = ['-q', '-W', '--keep-going', '-j', 'auto',
               '-d', src.parent/'doctrees', '-c', pages.ROOT/'docs', src, html]
    if fault := main(list(map(str, options))): sys.exit(fault)
    shutil.move(html, out)
    print(f'The site: {out/"index.html"}')
