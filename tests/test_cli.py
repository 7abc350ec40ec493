"The command line: what it runs, what it says is wrong, and that its help does not load PyTorch."
import json, os, re, shlex, subprocess, sys, time
from inspect import signature
from pathlib import Path
import pandas as pd, pytest
from fedlit.cli import main, setting, _names, parser, CHOICES, _parse_args
from fedlit.data import datasets
from fedlit.local import Local
from fedlit.methods import MOON, FedAvg, FedDecorr, FedPer, FedProx
from fedlit.result import Run
from fedlit.papers.collapse import collapse_runs
from fedlit import cli, partition
from fedlit.compare import compare
from fedlit.setting import PARTITIONS, plain
from conftest import DATA

@pytest.mark.parametrize('args,word', [
    (['--clients', '5000'], '5000'),
    (['--proxy-samples', '100000'], '--proxy-samples 100000 of 1438'),
    (['--option', 'features=-3'], 'features=-3'),
    (['--option', 'features=abc'], "features='abc'"),
    (['--option', 'featurs=128'], "mlp has no option 'featurs'; did you mean 'features'"),
    (['--model', 'CNN-4', '--option', 'widht=1'], "no option 'widht'; did you mean 'width'"),
    (['--from', 'nofile'], '--from nofile: there is no such file; it is one that `fedlit run --json` wrote'),
    (['--device', 'gpu'], 'PyTorch knows no such device.*; there is cpu'),
    (['--device', 'tpu'], "device='tpu'"),
    (['--device', 'cuda:99'], 'cuda:99'),
    (['--partition', 'Dirichlt'], 'did you mean dirichlet'),
    (['--partition', 'By-Domain'], 'digits has no domains'),
    (['--clients', '100', '--alpha', '.01'], 'form="rebalanced" always does'),
    (['--partition', 'dirichlet(min_size=200)'], 'min_size=200 must be'),
    (['--partition', 'dirichlet(min_size='], 'is not a call with named constants'),
    (['--partition', 'dirichlet(least=2)'], "dirichlet has no option 'least'.*It has: alpha, min_size, form"),
    (['--concepts', '11'], 'concepts=11 must be a whole number between 2 and 10'),
    (['--concepts', '3'], 'clients=10 must be a multiple of the 3 domains'),
    (['--record', 'copmile'], 'did you mean compile'),
    (['--record', 'graph', '--device', 'cpu'], "record='graph' on cpu"),
    (['--data', 'cifar10', '--root', '/nowhere'], 'nowhere.*--download'),
    (['--steps', '5'], '--steps 5 beside --epochs 1: clients count one or the other'),
    (['--threads', '100000'], 'threads=100000, but it must be a whole number from 1 to 1024'),
    (['--executor', 'gpu'], 'executor.*auto')])
def test_the_command_line_says_what_is_wrong(args, word):
    with pytest.raises(SystemExit, match=f'^fedlit: .*{word}') as e:
        main(['run', '--quiet', '--rounds', '1', '--epochs', '1', *args])
    assert '\n' not in str(e.value)

@pytest.mark.parametrize('args,word', [
    (['--rounds', '0'], "--rounds: '0', but it must be a whole number, at least 1"),
    (['--alpha', '-1'], "--alpha: '-1', but it must be a positive number"),
    (['--alpha', 'nan'], "--alpha: 'nan'"), (['--clients', '2.5'], "--clients: '2.5'"), (['--lr', '-.1'], '--lr: '),
    (['--lr', 'inf'], "--lr: 'inf', but it must be a positive number"), (['--epochs', '0'], '--epochs: '),
    (['--participation', '1.5'], r'--participation: .* in \(0, 1\]'), (['--momentum', '1'], '--momentum: '),
    (['--train-samples', '0'], "--train-samples: '0'"), (['--evaluate-every', '0'], '--evaluate-every: '),
    (['--seed', '-1'], '--seed: '), (['--seed', str(2**64)], r'--seed: .* below 2\*\*64'),
    (['--roundes', '3'], 'unrecognized arguments: --roundes 3')])
def test_a_bad_number_is_told_in_one_line(args, word, capsys):
    with pytest.raises(SystemExit) as e: main(['run', '--quiet', *args])
    said = capsys.readouterr().err
    assert e.value.code == 2 and re.fullmatch(f'fedlit run: error: .*{word}.*; see fedlit run --help\n', said), said

def test_names_are_read_without_case_and_dashes(capsys):
    a = parser().parse_args(['run', '--partition', 'Classes-per-client', '--data', 'Digits', '--model', 'MLP',
                             '--executor', 'TorchRun:VMAP', '--weighting', 'Uniform', '--statistics', 'HOME',
                             '--precision', 'BFloat-16', '--bad-clients', 'Skip', '--record', 'Compile'])
    _names(a, 'fedavg()')
    assert [a.partition, a.data, a.model, a.executor, a.weighting, a.statistics, a.precision, a.bad_clients,
            a.record] == ['classes_per_client', 'digits', 'mlp', 'torchrun:vmap', 'uniform', 'home', 'bfloat16',
                          'skip', 'compile']

@pytest.mark.parametrize('args', [
    ['--partition', 'quantity_skew', '--alpha', '.1'], ['--concepts', '2'],
    ['--partition', 'dirichlet(form="rebalanced")', '--alpha', '.05', '--clients', '100']])
def test_every_partition_trains(args, tmp_path):
    main(['run', '--quiet', '--rounds', '1', '--steps', '1', '--json', str(file := tmp_path/'run.json'), *args])
    assert 0 < json.loads(file.read_text(encoding='utf-8'))['history'][0]['accuracy'] < 1

def test_the_partitions_of_the_command_line_are_those_of_a_setting():
    assert set(CHOICES['partition']) == set(PARTITIONS) == {
        n for n in partition.__all__ if 'clients' in signature(getattr(partition, n)).parameters}

def test_nothing_is_compared_with_itself():
    with pytest.raises(SystemExit, match=r'the methods: MOON\(mu=1\.0.* is there twice'):
        main(['compare', '--quiet', '--methods', 'MOON()', 'FedAvg()', 'moon(mu=1)'])
    with pytest.raises(ValueError, match='methods has MOON.* twice'): compare([MOON(), MOON(mu=1)])

@pytest.mark.parametrize('record', ['false', 'True'])
def test_a_run_says_how_it_was_recorded(record, tmp_path):
    main(['run', '--quiet', '--rounds', '1', '--epochs', '.1', '--record', record, '--checkpoint', str(tmp_path/'run')])
    run = Run.load(tmp_path/'run')
    assert run.settings['record'] is (record == 'True')
    main(['run', '--quiet', '--rounds', '2', '--epochs', '.1', '--checkpoint', str(tmp_path/'run')]) # it goes on
    assert Run.load(tmp_path/'run').state.round == 2

def test_the_list_has_data_networks_and_methods(capsys):
    main(['list'])
    out = capsys.readouterr().out
    assert all(w in out for w in ('cifar10', 'mobilenetv2', 'exits_mlp', 'FedDecorr('))

@pytest.mark.parametrize('command', [['compare'], ['interactions', 'FedAvg()']], ids=lambda c: c[0])
@pytest.mark.parametrize('texts,seeds', [
    (['2'], [0, 1]), (['0', '2'], [0, 2]), (['3,5'], [3, 5]), (['7,'], [7]), (['0,'], [0]), (['3,', '5'], [3, 5])],
    ids=str)
def test_seeds_mean_one_thing(command, texts, seeds):
    assert parser().parse_args([*command, '--seeds', *texts]).seeds == seeds
    assert 'the seeds 0 to n-1' in parser().commands[command[0]].format_help()

def test_the_seeds_of_compare_and_interactions(monkeypatch, tmp_path):
    quick = ['--quiet', '--rounds', '1', '--epochs', '.1', '--train-samples', '200', '--test-samples', '50']
    main(['compare', '--methods', 'FedAvg()', '--seeds', '2', '--json', str(tmp_path/'a'), *quick])
    main(['interactions', 'FedProx()', 'FedAvgM()', '--seeds', '2', '--json', str(tmp_path/'b'), *quick])
    a, b = (json.loads((tmp_path/k).read_text(encoding='utf-8')) for k in 'ab')
    assert [r['seed'] for r in a['runs']] == b['seeds'] == a['asked']['seeds'] == b['asked']['seeds'] == [0, 1]

@pytest.mark.skipif(not (DATA/'cifar-10-batches-py').exists(), reason=f'no CIFAR-10 in {DATA}')
def test_cifar10_through_the_command_line(capsys):
    main(['run', '--quiet', '--data', 'cifar10', '--root', str(DATA), '--train-samples', '64', '--test-samples', '50',
          '--model', 'mobilenetv2', '--clients', '2', '--alpha', '0.5', '--rounds', '1', '--epochs', '1',
          '--batch-size', '64', '--method', 'FedDecorr()', '--evaluate-every', '5'])
    assert 'Run of FedDecorr' in capsys.readouterr().out

RUN = ['run', '--quiet', '--epochs', '1', '--evaluate-every', '2']

def test_a_log_has_every_round_once(tmp_path, capsys):
    "Also where the run is done in two parts, and it can be read after each round."
    log, seen = tmp_path/'log.csv', []
    ask = [*RUN, '--log-csv', str(log), '--checkpoint', str(tmp_path/'run')]
    main([*ask, '--rounds', '1'])
    one = pd.read_csv(log)
    whole = cli.write_file
    def write(path, *args):
        whole(path, *args)
        if path == str(log): seen.append(len(pd.read_csv(path)))
    with pytest.MonkeyPatch.context() as m:
        m.setattr(cli, 'write_file', write)
        main([*ask, '--rounds', '4'])
    assert seen == [2, 3, 4]
    both = pd.read_csv(log)
    pd.testing.assert_frame_equal(both[:1][list(one)], one, rtol=1e-12)
    assert both['round'].tolist() == [1, 2, 3, 4] and both['accuracy'].isna().tolist() == [False, False, True, False]
    pd.testing.assert_frame_equal(both, Run.load(tmp_path/'run').history, check_dtype=False, rtol=1e-12)

@pytest.mark.skipif(not Path('/dev/full').exists(), reason='no /dev/full')
def test_a_log_that_is_not_written_is_named():
    with pytest.raises(SystemExit, match='fedlit: --log-csv /dev/full was not written: .*No space'):
        main([*RUN, '--rounds', '1', '--log-csv', '/dev/full'])

def at_a_shell(redirections, *argv, folder):
    "Exit status of fedlit, and what it said, at a POSIX shell with these redirections."
    words = ' '.join(map(shlex.quote, (sys.executable, '-m', 'fedlit', *argv)))
    done = subprocess.run(['bash', '-c', f'{words} {redirections}; exit ${{PIPESTATUS[0]}}'], cwd=folder,
                          capture_output=True, text=True,
                          env={**os.environ, 'PYTHONPATH': str(Path(__file__).parents[1])})
    return done.returncode, done.stdout + done.stderr

posix = pytest.mark.skipif(sys.platform == 'win32', reason='no such shell')

@posix
def test_a_warning_is_one_line(tmp_path):
    rc, said = at_a_shell('', *RUN, '--rounds', '1', '--lr', '1e6', '--bad-clients', 'skip', folder=tmp_path)
    assert rc == 0 and 'UserWarning: client' in said and '.py' not in said and 'main()' not in said
FULL = pytest.param('>/dev/full', 1, marks=pytest.mark.skipif(not Path('/dev/full').exists(), reason='no /dev/full'))
FILES = ['--json', 'r.json', '--save', 'r.safetensors', '--report', 'r.html',
         '--log-csv', 'log.csv', '--checkpoint', 'c']

@posix
@pytest.mark.parametrize('redirections, status', [('| head -0', 0), ('2>&1 | head -0', 0), ('>&- 2>&- <&-', 0), FULL,
                                                  ('>&-', 0), ('2> >(head -0)', 0)])
def test_who_does_not_listen_has_the_files_all_the_same(redirections, status, tmp_path):
    "A closed pipe, closed streams and a full disk behind them end printing and nothing else."
    seen, said = at_a_shell(redirections, 'run', '--clients', '4', '--rounds', '40', '--epochs', '.1', *FILES,
                            folder=tmp_path)
    assert json.loads((tmp_path/'r.json').read_text(encoding='utf-8'))['history'][-1]['round'] == 40
    assert Run.load(tmp_path/'r.safetensors').state.round == Run.load(tmp_path/'c').state.round == 40
    assert len(pd.read_csv(tmp_path/'log.csv')) == 40 and '</html>' in (tmp_path/'r.html').read_text(encoding='utf-8')
    assert seen == status and 'Errno' not in said and 'Exception ignored' not in said
    assert ('was lost: No space left on device' in said) == bool(status)

@posix
def test_other_commands_keep_their_files_and_their_status_too(tmp_path):
    some = ['--clients', '4', '--rounds', '1', '--epochs', '.1', '--quiet', '--json', 'c.json']
    assert at_a_shell('| head -0', 'compare', *some, folder=tmp_path)[0] == 0 and (tmp_path/'c.json').exists()
    assert at_a_shell('| head -1', 'list', folder=tmp_path) == (0, 'data sets: ' + ', '.join(datasets()) + ' \n')
    assert at_a_shell('| head -0', 'run', '--data', 'digit', folder=tmp_path)[0] == 1

@pytest.mark.parametrize('option, later', [('--log-csv', 'parts_of'), ('--json', 'parts_of'), ('--save', 'parts_of'),
                                           ('--checkpoint', 'Simulation.train')])
def test_a_file_that_cannot_be_written_is_refused_before_training(tmp_path, option, later, monkeypatch):
    monkeypatch.setattr(f'fedlit.run.{later}', lambda *_: pytest.fail('it goes on'))
    with pytest.raises(SystemExit, match=f'{tmp_path} is a folder; name a file'): main([*RUN, option, str(tmp_path)])

SMALL = ['--clients', '4', '--epochs', '.1', '--train-samples', '200', '--test-samples', '100', '--quiet']

def test_a_file_that_fails_takes_no_other_with_it(tmp_path, capsys, monkeypatch):
    "Neither the table, nor the other files; each that failed is named."
    def fail(e):
        def failing(self, *args, **kw): raise e
        return failing
    monkeypatch.setattr(Run, 'save', fail(OSError(28, 'No space left on device')))
    monkeypatch.setattr(Run, 'report', fail(IndexError('a mistake of ours')))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match='fedlit: full/a was not written: .*No space.*; r.html was not .*of ours') as e:
        main(['run', *SMALL, '--rounds', '1', '--save', 'full/a', '--report', 'r.html', '--json', 'r.json'])
    said = capsys.readouterr()
    assert 'accuracy' in said.out and 'wrote r.json' in said.out
    assert len(json.loads(Path('r.json').read_text(encoding='utf-8'))['history']) == 1
    assert 'Traceback' in said.err and 'ours' in said.err and 'No space' not in said.err and '\n' not in str(e.value)

@pytest.mark.parametrize('command, over', [
    ('run --save d.json --json ./d.json', '--save d.json would be written over --json'),
    ('run --checkpoint k --json k', '--json k would be written over --checkpoint'),
    ('run --data t.csv --y a --log-csv t.csv', '--log-csv t.csv would be written over --data'),
    ('run --from r.json --json r.json', '--json r.json would be written over --from'),
    ('report-run m.st --to m.st', '--to m.st would be written over the file'),
    ('report-run m.html', '--to m.html would be written over the file')])
def test_no_file_is_written_over_another_of_the_same_command(command, over, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path('r.json').write_text(json.dumps(dict(settings=dict(setting=plain(asked_for()), asked={}))), encoding='utf-8')
    for name in ('m.st', 'm.html', 't.csv'): Path(name).write_text('kept', encoding='utf-8')
    with pytest.raises(SystemExit, match=f'fedlit: {over}'): main(command.split())
    assert {Path(name).read_text(encoding='utf-8') for name in ('m.st', 'm.html', 't.csv')} == {'kept'}

def test_a_page_of_a_folder_is_refused_as_a_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match='is a folder'): main(['report-run', '.'])

def test_a_data_set_of_a_name_is_no_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for _ in range(2): main(['run', *SMALL, '--rounds', '1', '--data', 'digits', '--checkpoint', 'digits'])

def test_ctrl_c_says_that_the_log_is_kept(tmp_path, monkeypatch):
    whole, left = cli.write_file, iter(range(1))
    def write(*args):
        if next(left, None) is None: raise KeyboardInterrupt
        return whole(*args)
    monkeypatch.setattr(cli, 'write_file', write)
    with pytest.raises(SystemExit, match='interrupted; nothing but .*log.csv is kept without --checkpoint'):
        main(['run', *SMALL, '--rounds', '2', '--log-csv', str(tmp_path/'log.csv')])

def test_a_repeated_run_is_recorded_as_it_was(tmp_path):
    main(['run', *SMALL, '--rounds', '1', '--record', 'false', '--json', str(tmp_path/'run.json')])
    assert _parse_args(['run', '--from', str(tmp_path/'run.json')]).record == 'false'

@pytest.mark.slow
@pytest.mark.skipif(sys.platform == 'win32', reason='no such signal')
def test_a_log_survives_a_kill(tmp_path, capsys):
    log, files = tmp_path/'log.csv', ['--log-csv', str(tmp_path/'log.csv'), '--checkpoint', str(tmp_path/'run')]
    dying = subprocess.Popen([sys.executable, '-m', 'fedlit', *RUN, '--rounds', '100000', *files])
    try:
        while not log.exists() or len(pd.read_csv(log)) < 3:
            assert dying.poll() is None
            time.sleep(.05)
    finally:
        dying.kill()
        dying.wait()
    n = int(pd.read_csv(log)['round'].iloc[-1])
    main([*RUN, '--rounds', str(n + 2), *files])
    assert pd.read_csv(log)['round'].tolist() == list(range(1, n + 3))

def test_what_reproduce_is_asked_is_told_before_anything_trains():
    with pytest.raises(SystemExit, match="'vmapp'; did you mean vmap"):
        main(['reproduce', '--quiet', 'moon', '--executor', 'vmapp'])

@pytest.mark.parametrize('args,word', [
    (['--seeds', '-2'], "--seeds: '-2', but it must be a whole number, at least 1"),
    (['--seeds', '0'], "--seeds: '0', but it must be a whole number, at least 1"),
    (['moon', '--minutes', '-1'], "--minutes: '-1', but it must be a number, at least 0"),
    (['moon', '--minutes', 'nan'], "--minutes: 'nan'")])
def test_a_bad_number_of_reproduce_is_told_before_anything_trains(args, word, capsys):
    with pytest.raises(SystemExit) as e: main(['reproduce', '--quiet', *args])
    assert e.value.code == 2 and word in capsys.readouterr().err

def test_the_list_takes_names_a_scale_and_a_part(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    def told(*words):
        main(['reproduce', '--list', *words])
        head, *lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 100 and not any(line[head.index('caption') - 1].strip() for line in lines)
        return head.split(), {line.split()[0]: line for line in lines if line[0] != ' '}
    head, lines = told('moon', '--scale', 'paper', '--only', 'seed=0')
    assert head == ['entry', 'paper', 'caption'] and all(name.startswith('moon/') for name in lines)
    _, all_seeds = told('moon', '--scale', 'paper')
    counts = [[re.search(r'\d+/(\d+)', there[k])[1] for there in (lines, all_seeds)] for k in lines]
    assert len(lines) > 5 and all(3*int(one) == int(whole) for one, whole in counts if one != whole)
    _, lines = told('collapse', 'feddecorr/table1')                # what comes with fedlit is there
    there, whole = re.search(r' (\d+)/(\d+) ', lines['collapse']).groups()
    assert there == whole and len(lines) == 2
    _, lines = told('collapse', '--out', 'mine')
    assert f' 0/{whole} ' in lines['collapse'] and not list(tmp_path.iterdir())

@pytest.mark.parametrize('args,word', [
    (['reproduce', 'moon/fig5', '--out', 'FILE'], 'is a file, but'),
    (['report', 'moon/fig5', '--to', 'FILE'], 'is a file, but'),
    (['interactions', 'FedAvg()', 'FedProx()', '--out', 'FILE'], 'is a file, but'),
    (['reproduce', 'moon/fig5', '--device', 'tpu'], "'tpu'"),
    (['reproduce', '--list', '--scale', 'x'], "no scale 'x'")])
def test_a_folder_a_device_a_scale_that_cannot_be_is_told_at_once(args, word, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path/'FILE').write_text('kept', encoding='utf-8')
    with pytest.raises(SystemExit, match=word) as e: main(args)
    assert len(e.value.code.splitlines()) == 1 and not capsys.readouterr().out
    assert [f.name for f in tmp_path.iterdir()] == ['FILE'] and (tmp_path/'FILE').read_text(encoding='utf-8') == 'kept'

def asked_for(*args):
    return setting(_parse_args(['run', *args]))

@pytest.mark.parametrize('args, options', [
    ([], dict(hidden=(64,)*3, features=64, norm='batch')),               # that of the main job
    (['--model', 'mlp', '--option', 'features=9'], dict(hidden=(64,)*3, features=9, norm='batch')),
    (['--model', 'small_cnn'], {}),                                        # which has no hidden layers to widen
    (['--model', 'small_cnn', '--option', 'width=.5'], dict(width=.5))])
def test_the_network_of_the_command_line_is_the_main_jobs(args, options):
    assert dict(asked_for(*args).options) == options

def test_the_networks_default_is_that_of_the_main_job():
    assert {s.options for _, s in collapse_runs('embedded')} == {asked_for().options}

@pytest.fixture
def repeated(tmp_path):
    "The setting of a run that begins from one with these options, and has others beside it."
    def of(*first, beside=()):
        said = dict(setting=plain(asked_for(*first)), asked={})
        (tmp_path/'run.json').write_text(json.dumps(dict(settings=said)), encoding='utf-8')
        return asked_for('--from', str(tmp_path/'run.json'), *beside)
    return of

OWNERS = ['--data', 'wards.csv', '--y', 'days', '--owner', 'clinic', '--partition', 'by_owner']

@pytest.mark.parametrize('first, beside, partition', [
    ([*OWNERS, '--clients', '3'], [], 'by_owner()'),
    ([*OWNERS, '--clients', '3'], ['--clients', '2'], 'by_owner()'),
    ([*OWNERS, '--clients', '3'], ['--partition', 'by_owner'], 'by_owner(every=True)'),
    (OWNERS, [], 'by_owner(every=True)'),
    (OWNERS, ['--clients', '3'], 'by_owner()'),
    ([], OWNERS, 'by_owner(every=True)')], ids=str)
def test_a_repeated_run_has_the_owners_it_had(repeated, first, beside, partition):
    made = repeated(*first, beside=beside)
    assert made.partition == partition
    if not beside: assert made == asked_for(*first)

def test_a_file_that_is_gone_on_from_with_another_network_leaves_its_options(repeated):
    of = lambda *beside: dict(repeated('--option', 'features=8', beside=beside).options)
    assert of()['features'] == 8 and of('--model', 'small_cnn') == {}

def test_epochs_beside_a_file_replace_its_steps(repeated):
    assert repeated('--steps', '7').local.steps == repeated('--epochs', '3', beside=['--steps', '7']).local.steps == 7
    assert repeated('--steps', '7', beside=['--epochs', '3']).local == asked_for('--epochs', '3').local

def test_a_grid_is_a_row_for_every_combination(tmp_path):
    ask = ['compare', '--rounds', '1', '--epochs', '1', '--seeds', '1', '--train-samples', '600', '--quiet']
    main([*ask, '--methods', 'FedAvg()', 'MOON() + FedDecorr()', '--grid', 'mu=.1,1', 'beta=.05,.1', '--json',
          str(tmp_path/'all.json')])
    said = [r['method'] for r in json.loads((tmp_path/'all.json').read_text(encoding='utf-8'))['table']]
    assert said == list(map(repr, [FedAvg(), *(MOON(mu=m) + FedDecorr(beta=b) for m in (.1, 1.) for b in (.05, .1))]))
    for grid, why in dict(mu='cannot be read', **{'tau=': 'cannot be read', 'lam=1': 'no method here has it',
                                                  'mu=exec(1)': 'cannot be read'}).items():
        with pytest.raises(SystemExit, match=why): main([*ask, '--methods', 'MOON()', '--grid', grid])

def test_a_comparison_that_breaks_prints_and_writes_what_is_finished(tmp_path, capsys):
    ask = ['compare', *SMALL, '--epochs', '1', '--rounds', '1', '--seeds', '2', '--json', str(tmp_path/'c.json')]
    with pytest.raises(SystemExit, match='fedlit: client 0 made .* in round 1'):
        main([*ask, '--methods', 'FedAvg()', 'FedProx(mu=1e9)'])
    said = json.loads((tmp_path/'c.json').read_text(encoding='utf-8'))
    assert [r['method'] for r in said['table']] == ['FedAvg()'] and len(said['runs']) == 2
    assert 'FedAvg()' in capsys.readouterr().out

@pytest.mark.filterwarnings('ignore')
def test_a_run_that_diverged_does_not_end_a_comparison(tmp_path):
    main(['compare', *SMALL, '--epochs', '1', '--rounds', '1', '--seeds', '1', '--lr', '1e6', '--bad-clients', 'report',
          '--methods', 'FedAvg()', 'FedProx()', '--json', str(tmp_path/'c.json')])
    said = json.loads((tmp_path/'c.json').read_text(encoding='utf-8'))['table']
    assert [r['method'] for r in said] == ['FedAvg()', repr(FedProx())] and 'nan' in said[0]['accuracy']

def test_a_comparison_in_python_is_that_of_the_command_line(tmp_path):
    mixture = 'dirichlet_mixture(alpha=1.0, train=60, test=30)' # which makes the clients' own test samples
    main(['compare', '--quiet', '--methods', 'FedPer()', '--seeds', '2', '--rounds', '2', '--epochs', '1', '--clients',
          '6', '--partition', mixture, '--json', str(tmp_path/'all.json')])
    theirs = json.loads((tmp_path/'all.json').read_text('utf-8'))
    theirs = pd.DataFrame([dict(r, seed=run['seed']) for run in theirs['runs']
                           for r in run['history']])
    ours = compare([FedPer()], partition=mixture, seeds=2, clients=6, rounds=2, local=Local(epochs=1), history=True,
                   options=asked_for().options)
    same = [c for c in ours if c in theirs]
    assert {'accuracy', 'personal', 'round', 'seed'} <= {*same}
    pd.testing.assert_frame_equal(ours[same], theirs[same])
