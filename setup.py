"Everything is read from settings.ini, which nbdev reads too."
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup, find_packages

here = Path(__file__).parent
parser = ConfigParser(delimiters=['='])
parser.read(here/'settings.ini', encoding='utf-8')
cfg = parser['DEFAULT']
extras = {k: cfg[f'{k}_requirements'].split() for k in ('dev', 'docs', 'flower')}
extras['dev'] += extras['flower'] # its notebook and tests run in CI

setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'], keywords=cfg['keywords'],
    long_description=(here/'README.md').read_text(encoding='utf-8'), long_description_content_type='text/markdown',
    author=cfg['author'], author_email=cfg['author_email'], url=cfg['git_url'], license='Apache-2.0',
    classifiers=['Intended Audience :: Science/Research', 'Programming Language :: Python :: 3'],
    packages=find_packages(include=['fedlit', 'fedlit.*']), package_data={'fedlit': ['*.csv']},
    python_requires=f">={cfg['min_python']}", install_requires=cfg['requirements'].split(),
    extras_require=extras,
    entry_points=dict(console_scripts=['fedlit=fedlit.cli:main'], nbdev=['fedlit=fedlit._modidx:d']),
    zip_safe=False)
