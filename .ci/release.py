"""May this tag be released? `python .ci/release.py v0.2.0` prints that version's part of the CHANGELOG, or says what
disagrees and ends with 1: settings.ini, fedlit/__init__.py, CITATION.cff and CHANGELOG.md must name its version."""
import re, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = {'settings.ini': r'^version = (\S+)$', 'fedlit/__init__.py': r'^__version__ = "(\S+)"$',
            'CITATION.cff': r'^version: (\S+)$'}

def text(name): return (ROOT/name).read_text(encoding='utf-8')

def sections():
    "The CHANGELOG as {heading without its date: text}, the newest first."
    _, *parts = re.split(r'^## (\S+).*$', text('CHANGELOG.md'), flags=re.M)
    return dict(zip(parts[::2], map(str.strip, parts[1::2])))

def complaints(tag):
    said = {name: (re.findall(form, text(name), re.M) or ['none'])[0] for name, form in VERSIONS.items()}
    version, notes = said['settings.ini'], sections()
    said['CHANGELOG.md'] = newest = next((v for v in notes if v != 'Unreleased'), None)
    if tag != f'v{version}': yield f'the tag is {tag}, but settings.ini makes it v{version}'
    if newest is None: yield 'CHANGELOG.md has no version'
    for name, other in said.items():
        if other not in (version, None): yield f'{name} has version {other}, but settings.ini {version}'
    if notes.get('Unreleased'): yield 'CHANGELOG.md still has changes under "Unreleased"'
    if version in notes and not notes[version]: yield f'CHANGELOG.md says nothing of {version}'

if __name__ == '__main__':
    tag = sys.argv[1]
    if wrong := list(complaints(tag)): sys.exit('\n'.join(f'release: {c}' for c in wrong))
    print(sections()[tag[1:]])
