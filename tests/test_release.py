"A release: the tag, the package, the citation and the newest section of the CHANGELOG must name one version."
import shutil, subprocess, sys
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    'settings.ini': '[DEFAULT]\nlib_path = fedlit\nversion = 0.2.0\n',
    'fedlit/__init__.py': '__version__ = "0.2.0"\n',
    'CITATION.cff': 'cff-version: 1.2.0\nversion: 0.2.0\n',
    'CHANGELOG.md': ('# Changelog\n\n## Unreleased\n\n## 0.2.0 (2027-01-10)\n\n### Added\n\n- A method.\n\n'
                     '## 0.1.0\n\n- The first.\n')}

def release(folder, tag):
    "What `.ci/release.py TAG` of the repository in `folder` ends with: its status, its notes, its complaints."
    (folder/'.ci').mkdir(exist_ok=True)
    shutil.copy(ROOT/'.ci'/'release.py', folder/'.ci')
    ended = subprocess.run([sys.executable, folder/'.ci'/'release.py', tag], capture_output=True, text=True)
    return ended.returncode, ended.stdout, ended.stderr

@pytest.fixture
def repository(tmp_path):
    for name, text in FILES.items():
        (tmp_path/name).parent.mkdir(exist_ok=True)
        (tmp_path/name).write_text(text, encoding='utf-8')
    return tmp_path

def test_a_version_that_all_files_name_is_released_with_its_notes(repository):
    assert release(repository, 'v0.2.0') == (0, '### Added\n\n- A method.\n', '')

@pytest.mark.parametrize('tag', ['v0.2.1', '0.2.0', 'v0.2', 'v0.2.0rc1', 'main'])
def test_a_tag_that_is_not_the_version_is_refused(repository, tag):
    status, notes, said = release(repository, tag)
    assert status and not notes and f'the tag is {tag}, but settings.ini makes it v0.2.0' in said

@pytest.mark.parametrize('file', [f for f in FILES if f != 'settings.ini'])
def test_a_file_with_another_version_is_refused(repository, file):
    (repository/file).write_text(FILES[file].replace('0.2.0', '0.1.9'), encoding='utf-8')
    status, notes, said = release(repository, 'v0.2.0')
    assert status and not notes and f'{file} has version 0.1.9' in said

@pytest.mark.parametrize('old, new, word', [
    ('## Unreleased\n', '## Unreleased\n\n### Fixed\n\n- A bug.\n', 'still has changes under "Unreleased"'),
    ('### Added\n\n- A method.\n', '', 'says nothing of 0.2.0'),
    ('## Unreleased\n\n## 0.2.0 (2027-01-10)\n\n### Added\n\n- A method.\n\n## 0.1.0\n\n- The first.\n', '',
     'has no version')])
def test_notes_that_are_not_ready_are_refused(repository, old, new, word):
    assert old in FILES['CHANGELOG.md']
    (repository/'CHANGELOG.md').write_text(FILES['CHANGELOG.md'].replace(old, new), encoding='utf-8')
    status, notes, said = release(repository, 'v0.2.0')
    assert status and not notes and word in said

def test_the_files_of_this_repository_agree(tmp_path):
    (tmp_path/'fedlit').mkdir()
    for name in FILES: shutil.copy(ROOT/name, tmp_path/name)
    version = next(line.split('=')[1].strip() for line in (ROOT/'settings.ini').read_text(encoding='utf-8').splitlines()
                   if line.startswith('version'))
    said = release(tmp_path, f'v{version}')[2]
    assert not [line for line in said.splitlines() if 'still has changes under "Unreleased"' not in line]
