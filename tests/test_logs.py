"""The recipes of nbs/guides/logs.ipynb, cell by cell, with the libraries themselves; what they wrote is read back."""
import json, struct, time
from pathlib import Path
import pytest

PAGE = Path(__file__).parents[1]/'nbs'/'guides'/'logs.ipynb'

def recipe(library, folder, monkeypatch):
    "What the names of the page are after its first cells and the recipe with this library, run in a folder."
    monkeypatch.chdir(folder)
    cells = [''.join(c['source']) for c in json.loads(PAGE.read_text(encoding='utf-8'))['cells']
             if c['cell_type'] == 'code']
    begun = [c for c in cells if 'from fedlit' in c or 'asked = dict' in c]
    mine, = [c for c in cells if library in c and '#| eval: false' in c]
    assert len(begun) == 2 and len(mine.splitlines()) < 12 # a few lines
    names = {}
    for c in (*begun, mine): exec(c, names)
    assert names['run'].state.round == 4
    return names['run'].history

def told(steps, column):
    "A column as a log should have it: the rounds that measured it, and their numbers."
    seen = column.dropna()
    assert [s for s, _ in steps] == [k + 1 for k in seen.index] and len(seen)
    assert [v for _, v in steps] == pytest.approx(seen.tolist(), rel=1e-6)

def test_tensorboard(tmp_path, monkeypatch):
    pytest.importorskip('tensorboard')
    history = recipe('tensorboard', tmp_path, monkeypatch)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    read = EventAccumulator(str(tmp_path/'runs'/'FedAvg'))
    read.Reload()
    assert set(read.Tags()['scalars']) == set(history)
    for k in history: told([(e.step, e.value) for e in read.Scalars(k)], history[k])

@pytest.mark.slow
def test_weights_and_biases(tmp_path, monkeypatch):
    pytest.importorskip('wandb')
    monkeypatch.setenv('WANDB_DIR', str(tmp_path))
    monkeypatch.setenv('WANDB_SILENT', 'true')
    history = recipe('wandb', tmp_path, monkeypatch)
    file, = tmp_path.rglob('run-*.wandb')
    for _ in range(100): # its service may still be writing when `finish` is back
        rows, summary, config = _read_wandb(file)
        if len(rows) == 4 and 'best f1' in summary: break
        time.sleep(.3)
    for k in history: told([(r['_step'], r[k]) for r in rows if k in r], history[k])
    assert summary['best f1'] == pytest.approx(history['f1'].max()) and config['method'] == 'FedAvg()'

def _records(data, at=7, block=2**15):
    "The records of a log in LevelDB's format, behind a header of seven bytes: checksum, length, kind, content."
    whole = b''
    while at + 7 <= len(data):
        if block - at % block < 7: at += block - at % block # too little room for a record: zeros
        length, kind = struct.unpack_from('<HB', data, at + 4)
        whole, at = whole + data[at+7:at+7+length], at + 7 + length
        if kind in (1, 4): # whole, or the last part of one
            yield whole
            whole = b''

def _read_wandb(file):
    "The rows, the summary and the configuration of an offline run."
    from wandb.proto.wandb_internal_pb2 import Record
    rows, summary, config = [], {}, {}
    value = lambda item: (item.key or '/'.join(item.nested_key), json.loads(item.value_json))
    for data in _records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        kind = record.WhichOneof('record_type')
        if kind == 'history': rows.append(dict(map(value, record.history.item)))
        if kind == 'summary': summary.update(map(value, record.summary.update))
        if kind == 'run': config.update(map(value, record.run.config.update))
        if kind == 'config': config.update(map(value, record.config.update))
    return rows, summary, config

@pytest.mark.slow
@pytest.mark.filterwarnings('ignore::DeprecationWarning', 'ignore::FutureWarning')
def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip('mlflow')
    history = recipe('mlflow', tmp_path, monkeypatch)
    client, run = mlflow.MlflowClient(), mlflow.last_active_run()
    for k in history:
        told([(m.step, m.value) for m in client.get_metric_history(run.info.run_id, k)], history[k])
    assert run.data.params['method'] == 'FedAvg()' and run.data.params['epochs'] == '2'
    assert [f.path for f in client.list_artifacts(run.info.run_id)] == ['run.safetensors']
