"Everything is read from settings.ini, which nbdev reads too. What pages draw and copy travels with the package."
import io, json, lzma, shutil, tarfile
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup, find_packages
from setuptools.command.build_py import build_py

here = Path(__file__).resolve().parent

# What is read back digit by digit: settings, and accuracies, where a mean over seeds may lie between two roundings
EXACT = 'setting', 'personal', 'curve', 'own', 'server', 'everywhere'

def short(value, exact=False):
    "A value of JSON with six digits a number."
    if isinstance(value, dict): return {k: short(v, exact or k in EXACT or 'accuracy' in k) for k, v in value.items()}
    if isinstance(value, list): return [short(v, exact) for v in value]
    return float(f'{value:.6g}') if isinstance(value, float) and not exact else value

def lean(content):
    "A result without what only the repository checks."
    if isinstance(content, dict): content = {k: v for k, v in content.items() if k not in ('format', 'crc32')}
    return json.dumps(short(content), separators=(',', ':')).encode()

def packed(folder):
    "The JSON files of `folder` as a tar.xz, without their own checksums and always the same bytes."
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode='w') as tar:
        for f in sorted((*folder.rglob('*.json'), *folder.rglob('*.jsonl.xz'))):
            if f.suffix == '.json': data = lean(json.loads(f.read_bytes()))
            else: data = lzma.compress(b''.join(lean(json.loads(t)) + b'\n' for t in lzma.open(f)), preset=9)
            member = tarfile.TarInfo(f'results/{f.relative_to(folder).as_posix()}')
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return lzma.compress(raw.getvalue(), preset=9)

class Build(build_py):
    def run(self):
        super().run()
        if self.editable_mode: return # the checkout has them as files
        there = Path(self.build_lib)/'fedlit'
        (there/'results.tar.xz').write_bytes(packed(here/'results'))
        shutil.copytree(here/'examples', there/'examples', ignore=shutil.ignore_patterns('__pycache__'),
                        dirs_exist_ok=True)

if __name__ == '__main__':
    parser = ConfigParser(delimiters=['='])
    parser.read(here/'settings.ini', encoding='utf-8')
    cfg = parser['DEFAULT']
    extras = {k: cfg[f'{k}_requirements'].split() for k in ('dev', 'docs', 'flower', 'hub', 'privacy')}
    extras['dev'] += extras['flower'] + extras['privacy'] # their notebooks and tests run in CI
    setup(
        name=cfg['lib_name'], version=cfg['version'], description=cfg['description'], keywords=cfg['keywords'],
        long_description=(here/'README.md').read_text(encoding='utf-8'), long_description_content_type='text/markdown',
        author=cfg['author'], author_email=cfg['author_email'], url=cfg['git_url'], license='Apache-2.0',
        classifiers=['Intended Audience :: Science/Research', 'Programming Language :: Python :: 3'],
        packages=find_packages(include=['fedlit', 'fedlit.*']), package_data={'': ['*.csv']},
        cmdclass=dict(build_py=Build),
        python_requires=f">={cfg['min_python']}", install_requires=cfg['requirements'].split(),
        extras_require=extras,
        entry_points=dict(console_scripts=['fedlit=fedlit.cli:main'], nbdev=['fedlit=fedlit._modidx:d']),
        zip_safe=False)
