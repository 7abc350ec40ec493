"""Samples to choose by: nobody trains on them, the test images stay out of every choice, and runs without them are as
they were."""
import json, warnings
from dataclasses import replace
from functools import partial
import numpy as np, pandas as pd, pytest, torch
from fedlit.cli import main
from fedlit.compare import choose, compare, table
from fedlit.data import Task, load
from fedlit.local import Local
from fedlit.measure import evaluate, spread
from fedlit.methods import FedAvg, FedBN, FedPer, FedProx
from fedlit.models import build
from fedlit.partition import by_domain, concept_shift, dirichlet
from fedlit.result import Run
from fedlit.run import federate
from fedlit.scores import tests_of as own_tests
from fedlit.setting import task_of

DIGITS = load('digits')
TASK = DIGITS.validation(.1)
CLIENTS = dirichlet(TASK.y_train, 6, .5, seed=0)

def go(method=None, rounds=3, task=TASK, clients=CLIENTS, **kw):
    return federate(build('mlp', task, seed=0, norm='batch'), task, clients, method or FedAvg(), rounds,
                    Local(epochs=1), device='cpu', progress=False, **kw)

@pytest.mark.parametrize('name', ['digits', 'digits_domains'])
@pytest.mark.parametrize('share', [.1, .37])
def test_every_training_sample_is_in_one_part(name, share):
    whole = load(name)
    task = whole.validation(share, seed=3)
    seen = torch.cat([task.x_train, task.x_val]).flatten(1)
    assert len(task.y_val) == round(share*len(whole.y_train))
    assert sorted(map(tuple, seen.tolist())) == sorted(map(tuple, whole.x_train.flatten(1).tolist()))
    assert task.x_test is whole.x_test and whole.x_val is None
    def group(part):
        domain = getattr(task, f'domain_{part}')
        return getattr(task, f'y_{part}') + (0 if domain is None else domain*10)
    n, m = group('train').bincount(), group('val').bincount(minlength=len(group('train').bincount()))
    assert ((m - share*(n + m)).abs() <= 1.).all()
    again, other = whole.validation(share, seed=3), whole.validation(share, seed=4)
    assert torch.equal(again.x_val, task.x_val) and not torch.equal(other.x_val, task.x_val)

def test_the_columns_are_what_evaluate_says():
    run = go(FedPer())
    seen = evaluate(run.model, TASK.x_val, TASK.y_val, prepare=TASK.normalise)
    assert run.last['validation'] == pytest.approx(seen['accuracy'], abs=1e-7)
    own = [(run.predict(TASK.x_val[at], k) == TASK.y_val[at]).float().mean().item()
           for k, at in enumerate(own_tests(TASK, CLIENTS, part='val'))]
    assert run.last['validation_personal'] == pytest.approx(np.mean(own), abs=1e-6)
    assert run.last['validation_personal_sd'] == pytest.approx(np.std(own, ddof=1), abs=1e-6)

def test_they_change_nothing_else():
    bare = Task('digits', TASK.x_train, TASK.y_train, TASK.x_test, TASK.y_test, 10, TASK.mean, TASK.std)
    one, two = go(FedBN()), go(FedBN(), task=bare)
    new = {k for k in one.history if k.startswith('validation')}
    assert new == {'validation', 'validation_personal', 'validation_personal_sd'}
    same = [k for k in two.history if k not in ('seconds', 'peak_mb')]
    assert [k for k in one.history if k not in (*new, 'seconds', 'peak_mb')] == same
    assert one.history[same].equals(two.history[same])
    assert all(torch.equal(v, two.state.params[k]) for k, v in one.state.params.items())

def test_metrics_see_them_and_test_images_do_not_decide(tmp_path):
    hits = lambda logits, y: (logits.argmax(1) == y).float().mean()
    run = go(rounds=4, metrics=dict(hits=hits), evaluate_every=2, checkpoint=str(tmp_path/'run'))
    h = run.history
    assert h['hits_validation'].dropna().tolist() == pytest.approx(h['validation'].dropna().tolist())
    for column in ('validation_hits', 'hits_validation'):
        if column in h:
            with pytest.raises(ValueError, match='choose another name'): go(metrics={column: hits, 'hits': hits})
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert run.best()['round'] == h.loc[h['validation'].idxmax(), 'round']
        assert Run.load(tmp_path/'run').best() == run.best()
        assert run.best('accuracy')['accuracy'] == h['accuracy'].max()

def test_without_them_a_warning_says_who_chose():
    run = go(task=DIGITS, clients=dirichlet(DIGITS.y_train, 6, .5, seed=0), rounds=2)
    with pytest.warns(UserWarning, match=r'test samples choose this round.*task.validation\(.1\)'): best = run.best()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert run.best('accuracy') == best

def test_the_best_round_is_not_that_of_the_test_images():
    "On test labels that are noise, test images choose a round at random, and the samples to choose by do not care."
    noise = torch.randint(10, (len(TASK.y_test),), generator=torch.Generator().manual_seed(0))
    odd = Task('noise', TASK.x_train, TASK.y_train, TASK.x_test, noise, 10, TASK.mean, TASK.std,
               x_val=TASK.x_val, y_val=TASK.y_val)
    one, two = go(rounds=5), go(rounds=5, task=odd)
    assert one.best()['round'] == two.best()['round'] and one.best()['validation'] == two.best()['validation']
    assert one.best()['accuracy'] > .5 > .25 > two.best()['accuracy']

def test_choose_goes_by_them_alone():
    grid = [FedProx(mu=m) for m in (.01, 5.)]
    runs = compare(grid, TASK, rounds=2, seeds=2, clients=4, history=True)
    assert choose(grid, runs) == grid[0] == choose(grid[::-1], runs)
    lied = runs.assign(accuracy=1 - runs.accuracy, personal=1 - runs.personal)
    assert choose(grid, lied) == grid[0] == choose(grid, lied, 'validation_personal')
    last = runs[runs['round'] == 2].groupby('method').validation.mean()
    assert last[repr(grid[0])] > last[repr(grid[1])]
    for column in ('accuracy', 'personal', 'loss', 'validation_loss_sd'):
        with pytest.raises(ValueError, match=f"column='{column}' is of test samples"): choose(grid, runs, column)
    with pytest.raises(ValueError, match=r'nothing of FedAvg\(\)'): choose([FedAvg()], runs)
    with pytest.raises(ValueError, match=r"no column 'validation': compare them on task.validation\(.1\)"):
        choose(grid, runs.drop(columns='validation'))

@pytest.mark.parametrize('history', [False, True])
def test_two_comparisons_do_not_pass_for_one_with_more_seeds(history):
    grid = [FedAvg(), FedProx(mu=.1)]
    runs = pd.DataFrame([dict(method=repr(m), seed=s, **({'round': r} if history else {}), validation=.5 + .1*r)
                         for m in grid for s in (0, 1) for r in (range(1, 4) if history else [3])])
    both = pd.concat([runs, runs.assign(validation=.1)])
    for f in (table, lambda runs: choose(grid, runs)):
        f(runs)
        with pytest.raises(ValueError, match=r'FedAvg\(\) with seed 0 is there twice, .*give those of one'): f(both)

def test_choose_refuses_what_is_no_number_and_names_it():
    a, b, c = grid = [FedProx(mu=m) for m in (.1, 1., 5.)]
    runs = pd.DataFrame([dict(method=repr(m), seed=s, round=r, validation=.5 + m.mu/100)
                         for m in grid for s in (0, 7) for r in (1, 2)])
    assert choose(grid, runs) == c
    runs.loc[3, 'validation'] = float('nan') # the last round of the first method's second seed
    with pytest.raises(ValueError, match=r"'validation' of FedProx\(mu=0.1\) with seed 7 is not a number"):
        choose(grid, runs)
    assert choose([b, c], runs) == c

def test_choose_is_told_what_a_metric_means():
    grid, wrong = [FedProx(mu=m) for m in (.01, 5.)], lambda z, y: (z.argmax(1) != y).float().mean()
    runs = compare(grid, TASK, rounds=2, seeds=2, clients=4, metrics=dict(wrong=wrong))
    assert choose(grid, runs, 'wrong_validation', lowest=True) == grid[0] == choose(grid, runs)
    assert choose(grid, runs, 'wrong_validation') == grid[1]
    assert {'wrong', 'wrong_validation', 'wrong_validation_personal'} <= {*runs}
    few = compare(grid[:1], TASK, rounds=1, seeds=1, clients=4, columns='accuracy', metrics=dict(wrong=wrong))
    assert few.columns.tolist() == ['method', 'seed', 'accuracy', 'wrong']
    with pytest.raises(ValueError, match="'wrong_validation'.*with this among columns"):
        choose(grid[:1], few, 'wrong_validation')

def test_domains_and_concepts_have_them_too():
    task = concept_shift(DIGITS, 2).validation(.2)
    for part in ('train', 'val'):
        read = getattr(task, f'y_{part}')
        assert len(read) == len(getattr(task, f'domain_{part}'))
    clients = by_domain(task.domain_train, 4)
    own = own_tests(task, clients, part='val')
    assert [task.domain_val[t].unique().tolist() for t in own] == [[0], [0], [1], [1]]
    later = concept_shift(DIGITS.validation(.2), 2)
    assert later.domain_val.bincount().tolist() == pytest.approx([len(later.y_val)/2]*2, abs=1)
    assert 'validation_personal' in go(FedPer(), 1, task, clients).last

def test_words_have_them_and_so_has_the_command_line(tmp_path):
    small = task_of('digits(size=4, train=500, validation=0.2)')
    assert tuple(small.x_val.shape) == (100, 1, 4, 4) and len(small.y_train) == 400
    main(['run', '--quiet', '--rounds', '2', '--epochs', '1', '--validation', '.1', '--json',
          str(file := tmp_path/'run.json')])
    assert all('validation' in row for row in json.loads(file.read_text(encoding='utf-8'))['history'])

def test_the_command_line_shows_what_to_choose_by(tmp_path, capsys):
    ask = ['compare', '--quiet', '--rounds', '2', '--epochs', '1', '--seeds', '2', '--methods', 'FedPer()', 'FedProx()']
    main([*ask, '--validation', '.2', '--json', str(file := tmp_path/'all.json')])
    head, *lines = (out := capsys.readouterr().out).splitlines()
    said = json.loads(file.read_text(encoding='utf-8'))
    last = [run['history'][-1]['validation'] for run in said['runs'] if 'FedPer' in run['method']]
    assert said['table'][0]['validation'] == format(spread(last), '.4f') and said['table'][0]['validation'] in lines[0]
    assert head.split()[:5] == ['method', 'accuracy', 'personal', 'validation', 'validation_personal']
    own = [run['history'][-1]['validation_personal'] for run in said['runs'] if 'FedPer' in run['method']]
    assert said['table'][0]['validation_personal'] == format(spread(own), '.4f')
    assert max(map(len, [head, *lines[:2]])) <= 120 and 'best by validation' in out
    main([*ask[:-2], 'FedProx()'])
    assert capsys.readouterr().out.split()[:4] == ['method', 'accuracy', 'best', 'by'] # without what nobody has

x, y = torch.rand(20, 4), torch.arange(20) % 2
mine = partial(Task, 'mine', x, y, x + 1, y, 2)

@pytest.mark.parametrize('call,says', [
    (lambda: TASK.validation(), '144 validation samples already'),
    (lambda: DIGITS.validation(1), r'share=1 of 1438 samples, but it must be a share in \(0, 1\)'),
    (lambda: DIGITS.validation(.9999), r'share=0.9999'), (lambda: DIGITS.validation('a'), "share='a'"),
    (lambda: mine(x_val=x), 'x_val and y_val belong together'),
    (lambda: mine(x_val=x, y_val=y[:3]), 'x_val has 20 samples but y_val has 3 labels'),
    (lambda: mine(x_val=x[:, :3], y_val=y), r'one of x_val \(3,\); they must have the same columns'),
    (lambda: mine(x_val=x, y_val=y + 1), 'y_val holds the label 2'),
    (lambda: mine(x_val=x, y_val=y, domain_val=y), 'domain_train and domain_val belong together'),
    (lambda: own_tests(DIGITS.validation(.001), CLIENTS, part='val'), r'of which y_val has no sample')])
def test_what_is_wrong_is_said(call, says):
    with pytest.raises(ValueError, match=says): call()

def test_a_validation_set_of_ones_own():
    task = mine(x_val=x[:6].numpy(), y_val=y[:6].tolist())
    assert len(task.y_val) == 6 and task.to('cpu').x_val.shape == (6, 4) and '6 val' in repr(task)

def test_samples_to_choose_by_that_are_not_numbers_are_named():
    task = DIGITS.subset(200, test=60).validation(.2)
    x = task.x_val.float()
    x[3, 0, 2, 5] = float('nan')
    clients = [torch.arange(80), torch.arange(80, 160)]
    with pytest.warns(UserWarning, match=r'validation samples is nan.*sample 3 of x_val .* \[0, 2, 5\]'):
        go(rounds=1, task=replace(task, x_train=task.x_train.float(), x_test=task.x_test.float(), x_val=x),
           clients=clients)
