"One compressed file of the results of a folder, which goes away: `python -m bench.pack results/catalogue/digits`."
import lzma, sys
from pathlib import Path
from fedlit.ground.files import _with_checksum, all_results, pack_of, write_file

DIGITS = dict(seconds=2, peak_mb=3, loss=3, train_loss=3, drift=3, spectra=4, layer_ranks=4, feature_maps=4)
TEXT = dict(id=lzma.FILTER_LZMA2, preset=9 | lzma.PRESET_EXTREME, lc=4, pb=0) # 4 % less than `preset=9`
TYPED = 'setting', 'settings'

def _round(value, digits=7):
    "A value of JSON with so many digits a number, fewer where `DIGITS` says so, and all of what was typed."
    if isinstance(value, dict):
        return {k: v if k in TYPED else _round(v, DIGITS.get(k, 3 if k.endswith('_sd') else digits))
                for k, v in value.items()}
    if isinstance(value, list): return [_round(v, digits) for v in value]
    return float(f'{value:.{digits}g}') if isinstance(value, float) else value

def pack(
    folder, # where results were written
):          # the file, of a line a result, compressed
    "Make one file of the results of a folder, which goes away; the last process should have written before."
    there, folder = all_results(folder), Path(folder)
    if not there: raise ValueError(f"no results in {folder}, or none that can be read")
    lines = ''.join(_with_checksum(dict(file=name, **_round(content)), separators=(',', ':')) + '\n'
                    for name, content in there.items())
    out = write_file(pack_of(folder), lzma.compress(lines.encode(), filters=[TEXT]))
    for name in there: (folder/name).unlink(missing_ok=True)
    if folder.exists() and not any(folder.iterdir()): folder.rmdir()
    return out

if __name__ == '__main__': print(*map(pack, sys.argv[1:]), sep='\n')
