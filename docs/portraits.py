"The small pictures of the table of methods, nbs/images/methods/*.svg: `python docs/portraits.py`."
import sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
from pages import NBS
from fedlit.parse import methods_by_name
from fedlit.portrait import portrait

folder = NBS/'images'/'methods'
folder.mkdir(parents=True, exist_ok=True)
for name, method in methods_by_name().items(): (folder/f'{name}.svg').write_text(portrait(method()).svg() + '\n')
for file in folder.glob('*.svg'):
    if file.stem not in methods_by_name(): file.unlink()
