"""fedlit on the stand-in accelerator of `tests/accelerator.py`, in processes of their own: every method, executor and
choice as on the CPU, faults that only an accelerator shows, and how often the host waits for it."""
import json, os, subprocess, sys
from functools import cache
from pathlib import Path
import fedlit.methods, pytest
from torch.utils import backend_registration
from fedlit.data import load
from fedlit.methods import FedAvg
from fedlit.models import build
from fedlit.parse import methods_by_name
from fedlit.run import federate
from conftest import THIRDS

HERE, NEAR = Path(__file__).parent, 3e-6
at_leisure = pytest.mark.skipif(not os.environ.get('FEDLIT_WHOLE'), reason='a quarter of an hour: FEDLIT_WHOLE=1')

@cache
def seen(group, *given):
    "What a group of checks has to say."
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'KINETO_LOG_LEVEL': '99', 'PYTHONPATH': str(HERE.parent)}
    if not hasattr(backend_registration, '_setup_privateuseone_for_python_backend'):
        pytest.skip('no backends written in Python before PyTorch 2.10')
    done = subprocess.run([sys.executable, str(HERE/'on_accelerator.py'), group, *given], env=env, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])

def agree(said):
    "No run that failed, none that is further from the CPU than rounding."
    bad = {k: v for k, v in said.items() if 'error' in v or not v['apart'] <= NEAR or v.get('differ') or v.get('lost')}
    assert not bad, bad

def test_the_device_is_what_it_says():
    d = seen('device')
    assert d['values'] == [[1., 5.]]*3 and d['stride'] == [1, 2] and d['same'] and d['shape'] == 3 + 18 + 3
    # a mask, a number; a list
    assert d['counts'] == {'SYNC': 2, 'TO CPU': 1, 'FROM CPU': 0, 'reads': 3}
    assert 'same device' in d['mixed'] and 'indices' in d['index'] and "'dev' device type for gen" in d['generator']
    assert all('float64' in v for v in d['double']) and not d['number'] and not d['indices']
    # numbers that are read together are exact
    assert d['told'] == [[2**53 + 1], [True, False, True], [[.1, 1.], [2., 3.]], [], 7, [1., 4.]]

# who reads more in a round of four clients, and why
# FedALA: has a client trained before? it alone knows; and the first time, is pass 11, 12, ... the last?
MORE = {'FedALA': 4 + 4}

def too_many(said):
    "Runs that read more than once for their memories, which are written to their tables together."
    more = lambda k: next((n for name, n in MORE.items() if k.startswith(name)), 0)
    # extract has shapes that depend on what each of the four clients has
    # a recording is compared with its step once a round, for every size of batches
    compared = lambda k: 2*('recorded' in k)
    return {k: v for k, v in said.items()
            if v.get('reads', 0) > v.get('tables', 0) + 4*v.get('parts', 0) + more(k) + compared(k)}

@pytest.mark.parametrize('third', THIRDS)
def test_every_method_is_on_the_device_what_it_is_on_the_cpu(third):
    "And waits for it not once in a round, but for what stays at home; an evaluation is none of a method's business."
    said = seen('methods', str(third))
    assert set(said['classes']) == set(methods_by_name())
    agree(said['seen'])
    assert not (bad := too_many(said['seen'])), bad

def test_a_read_in_a_hook_passes_the_bound():
    for name, said in seen('hooks').items():
        agree(said)
        assert too_many(said) == said != {}, (name, said)

@pytest.mark.slow
@at_leisure
def test_every_form_and_sum_in_every_executor_recorded_and_not():
    said = seen('methods', 'whole')['seen']
    agree(said)
    assert not (bad := too_many(said)), bad

def test_whole_runs(): agree(seen('runs'))

@pytest.mark.slow
@pytest.mark.parametrize('part', [*THIRDS, pytest.param('whole', marks=at_leisure)])
def test_every_class_in_a_run_of_its_own_with_what_the_server_has(part):
    "The public set lies on the CPU, where the caller made it."
    said = seen('forms', str(part))
    assert set(said['classes']) == set(methods_by_name())
    agree(said['seen'])

@pytest.mark.slow
def test_a_public_set_of_the_catalogue_goes_to_the_device():
    for id, said in seen('plan', 'dev', 'fedgse/table4.3').items():
        assert said['done'] == said['runs'] > 1 and said['device'] == ['dev'], (id, said)

def test_what_a_run_is_asked_once_it_is_over():
    said = seen('after')
    agree(said)
    assert len(said) == 8

def test_steps_that_cannot_be_compiled_are_played_from_the_tape():
    said = seen('compiled')
    agree(dict(compiled=said))
    assert len(said['words']) == 1 and 'played from the tape or run as they are' in said['words'][0], said['words']

@pytest.mark.parametrize('precision', ['bfloat16', 'float16'])
def test_a_device_without_autocast_is_named(precision):
    t = load('digits')
    with pytest.raises(ValueError, match=f"precision='{precision}' on 'meta', but PyTorch has no autocast"):
        federate(build('mlp', t, seed=0), t, [range(9)], FedAvg(), precision=precision, device='meta')

def test_bad_clients_are_met_with_the_same_words():
    said = seen('guard')
    for then, v in said.items():
        words = v.get('words', [])
        assert words[:len(words)//2] == words[len(words)//2:], then
        assert then == 'huge' or 'client 2 produced NaN' in str(words)
    agree({k: v for k, v in said.items() if 'apart' in v})
    assert 0 < said['huge']['skipped'][0] < 6

def test_tables_on_disk_and_checkpoints_go_from_one_device_to_the_other():
    said = seen('kept')
    agree(said)
    assert said['past the budget']['on_disk']
    assert [said[f'{k}, loaded']['at'] for k in ('cpu to dev', 'dev to cpu')] == ['dev', 'cpu']

COMPARED = 2 # how many sizes of batches there are: a recording of each is compared with its step once a round

MOST = {
    'FedAvg, vmap': 2, 'FedAvg, loop': 2, 'FedAvg, skipping': 2, 'HeteroFL, vmap': 2, 'FedAvg, metrics': 2,
    'HeteroFL, extract': 6 + 2,             # six clients, and shapes that depend on what each has
    'SCAFFOLD, vmap': 2 + 1,                # memories are written to their tables together
    # tests of those who took part, and of everybody; its short batches are not filled up: two more sizes
    'Ditto, vmap': 3 + 2 + 2,
    'FedCAC, vmap': 2 + 1 + 2,              # memories, and personal tests
    'FedALA, vmap': 2 + 1 + 2 + 4*6,        # has this client trained? as it begins and in three tests
    'MOON + FedDecorr, vmap': 2 + 1 + 2,    # which samples, and what FedDecorr notices
    }

def test_a_round_waits_for_the_device():
    "Once for the clients' numbers, once for the server's and the test, and for comparisons; bounds from above."
    for name, said in seen('waits').items():
        assert said['reads'] <= MOST[name] + COMPARED*(1 + ('loop' in name)), (name, said)

@pytest.mark.parametrize('whole', [(), pytest.param(('whole',), marks=[pytest.mark.slow, at_leisure])],
                         ids=['some', 'all'])
def test_a_device_without_double_precision(whole):
    "Apple's: methods and whole runs, none of which puts a float64 there."
    said = seen('single', *whole)
    assert said['finest'] == 'torch.float32'
    agree(said['seen'])

def test_the_plan_of_the_first_hour():
    "The four commands in slices: none is refused the device, each goes on where the one before it stopped."
    for id, said in seen('plan').items():
        assert said['left'][-2:] == ['all results are there']*2, (id, said)
        assert said['done'] == said['runs'] > 1 and said['device'] == ['dev'] and said['rounds'] == [2], (id, said)
        assert {'feddecorr': ['curve', 'spectra'], 'moon': ['curve', 'everywhere']}.get(
            id.partition('/')[0], ['curve']) == said['measured'], (id, said)

@pytest.mark.parametrize('names', [(), pytest.param(('all',), marks=[pytest.mark.slow, pytest.mark.long])],
                         ids=['plan', 'all'])
def test_networks_and_augmentations(names): agree(seen('networks', *names))

def test_faults_that_only_an_accelerator_shows():
    said = seen('planted')
    for name in ('LeftBehind', 'Homeless'):
        assert 'Expected all tensors to be on the same device' in said[name]['error']
    assert not said['FedAvg']['error'] and not said['ThroughTheHost']['error']
    assert said['ThroughTheHost']['reads'] > 5*said['FedAvg']['reads']

def test_methods_ask_a_device_for_doubles_only_where_it_may_have_them():
    "An Apple GPU has none."
    for f in Path(fedlit.methods.__file__).parent.glob('*.py'):
        text = f.read_text(encoding='utf-8').replace('.cpu().double()', '')
        assert '.double()' not in text and 'torch.double' not in text.replace('== torch.double', ''), f.name
