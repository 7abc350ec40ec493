"Clients with different networks, against loops in plain PyTorch that share nothing with fedlit but the batches."
import copy, pickle, re, time, warnings
import numpy as np, pytest, torch, torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from fedlit.data import load
from fedlit.ground.draws import Seeded
from fedlit.ground.files import lock_folder
from fedlit.local import Local
from fedlit.methods import (DPSGD, DSFL, MOON, SCAFFOLD, SOLO, CoordinateMedian, FedAdam, FedAMP, FedAsync, FedAvg,
                            FedAvgM, FedCAC, FedDF, FedDyn, FedET, FedNova, FedPer, FedProto, FedProx)
from fedlit.measure import accuracy
from fedlit.methods.fedmd import FedMD
from fedlit.methods.fedet import consensus, diversity
from fedlit.models import build, wrap
from fedlit.networks import MixedRun, by_network
from fedlit.participation import Clock, PowerOfChoice
from fedlit.partition import dirichlet
from fedlit.run import federate, federating
from by_hand import descend, drawn, sgd

TASK = load('digits')
CLIENTS = dirichlet(TASK.y_train[:600], 6, .5, seed=0)
PROXY = TASK.normalise(TASK.x_train[600:800])
LOCAL = Local(epochs=1, lr=.05, momentum=.9)

class Dense(nn.Module):
    def __init__(self, *hidden, features=16):
        super().__init__()
        sizes = 64, *hidden, features
        self.body = nn.Sequential(*(m for a, b in zip(sizes, sizes[1:]) for m in (nn.Linear(a, b), nn.ReLU())))
        self.head = nn.Linear(features, 10)
    def forward(self, x): return (z := self.body(x.flatten(1))), self.head(z)

class Conv(nn.Module):
    def __init__(self, channels=4, features=16):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, channels, 3, 2), nn.Linear(features, 10)
        self.lin = nn.Linear(9*channels, features)
    def forward(self, x): return (z := self.lin(self.conv(x).relu().flatten(1)).relu()), self.head(z)

def three():
    "Six clients with three architectures, out of order."
    torch.manual_seed(0)
    a, b, c = Dense(), Dense(24, 24), Conv()
    return [a, b, c, a, c, c]

def run(networks, method, rounds=2, **kw):
    kw = dict(dict(rounds=rounds, local=LOCAL, proxy=PROXY, progress=False, device='cpu', weighting='samples'), **kw)
    return federate(networks, TASK, CLIENTS, method, **kw)

def trained(net, k, round, *term):
    "A copy of a network after a round of client `k`."
    return sgd(net, drawn(TASK, CLIENTS, k, LOCAL, round), *term, lr=LOCAL.lr, momentum=LOCAL.momentum).eval()

def student(net, teacher, method, round):
    "A copy of a network after it has learned from a teacher's logits."
    net, gen = copy.deepcopy(net).train(), torch.Generator().manual_seed(round)
    opt = torch.optim.Adam(net.parameters(), method.lr)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(opt, method.steps)
    for _ in range(method.steps):
        i = torch.randperm(len(PROXY), generator=gen)[:128]
        p = teacher[i].softmax(-1)
        descend(opt, (p*(p.log() - net(PROXY[i])[1].log_softmax(-1))).sum(-1).mean())
        slower.step()
    return net

def average(nets, weights):
    out, total = copy.deepcopy(nets[0]), sum(weights)
    with torch.no_grad():
        for v, *each in zip(out.parameters(), *(n.parameters() for n in nets)):
            v.copy_(sum(w*e for w, e in zip(weights, each))/total)
    return out

def opinions(nets):
    with torch.no_grad(): return torch.stack([n(PROXY)[1] for n in nets])

def apart(net, other): return max((a - b).abs().max().item() for a, b in zip(net.parameters(), other.parameters()))

TEACHERS = {FedDF(steps=20): lambda l: l.mean(0),
            FedET(steps=20): lambda l: ((consensus(l).softmax(-1) + .05*diversity(l).softmax(-1))/1.05).log()}

@pytest.mark.parametrize('method', TEACHERS, ids=lambda m: m.name)
@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_students_of_all(method, executor):
    "Weights are averaged among clients with one network, opinions among all; the server's own network only listens."
    nets, own = three(), Dense(32, 32)
    got = run([*nets, own], method, executor=executor)
    kinds = by_network([*nets, own], 6)
    for r in range(2):
        after = {k: trained(net, k, r) for net, who in kinds for k in who}
        teacher = TEACHERS[method](opinions(after.values()))
        kinds = [(student(average([after[k] for k in who], [len(CLIENTS[k]) for k in who]) if who else net,
                          teacher, method, r), who) for net, who in kinds]
    assert [who for _, who in kinds] == got.who == [[0, 3], [1], [2, 4, 5], []]
    for (net, _), one in zip(kinds, got.runs): assert apart(net, one.model) < 2e-5

def test_opinions_without_weights():
    "DS-FL: everybody keeps a network, and hears what all have said of the public samples."
    nets, method = three(), DSFL(steps=20)
    got, own, said = run(nets, method), dict(enumerate(map(copy.deepcopy, nets))), None
    students = {id(n): n for n in nets}
    for r in range(2):
        def imitation(k, r=r, said=said, B=method.batch_size):
            n, steps = len(PROXY), len(list(drawn(TASK, CLIENTS, k, LOCAL, r)))
            first = r*steps if steps*B < n else 0 # a short round goes on where the last one stopped
            def imitate(net, x, y, t):
                if said is None: return 0.
                i = ((first + t)*B + torch.arange(B)) % n
                return F.cross_entropy(net(PROXY[i])[1], said[i].softmax(-1))
            return imitate
        own = {k: trained(net, k, r, imitation(k)) for k, net in own.items()}
        said = opinions(own.values()).softmax(-1).mean(0)/method.T
        students = {i: student(net, said, method, r) for i, net in students.items()}
    for k, net in own.items(): assert apart(net, got.network(k)) < 2e-5
    for net, one in zip(students.values(), got.runs): assert apart(net, one.model) < 2e-5

def test_prototypes_of_all():
    "FedProto: class means of features, which all networks make equally long."
    nets = three()
    got, own = run(nets, FedProto()), dict(enumerate(map(copy.deepcopy, nets)))
    means, known = torch.zeros(10, 16), torch.zeros(10, dtype=torch.bool)
    for r in range(2):
        def near(net, x, y, t, means=means, known=known):
            return ((net(x)[0] - means[y])*known[y][:, None]).square().mean()
        own = {k: trained(net, k, r, near) for k, net in own.items()}
        seen = {c: [] for c in range(10)}
        for k, net in own.items():
            x, y = TASK.normalise(TASK.x_train[CLIENTS[k]]), TASK.y_train[CLIENTS[k]]
            with torch.no_grad(): z = net(x)[0]
            for c in y.unique().tolist(): seen[c].append(z[y == c].mean(0))
        means = torch.stack([torch.stack(v).mean(0) if v else means[c] for c, v in seen.items()])
        known = known | torch.tensor([bool(v) for v in seen.values()])
    for k, net in own.items(): assert apart(net, got.network(k)) < 2e-5
    for one in got.runs: assert (one.state.server['FedProto']['means'] - means).abs().max() < 2e-5

@pytest.mark.parametrize('method', [FedDF(steps=5), DSFL(steps=5), FedProto(), SOLO(), FedAvgM() + FedDF(steps=5)],
                         ids=repr)
def test_one_network_for_all_is_the_plain_run(method):
    net = Dense()
    plain, got = run(net, method), run([net]*6, method)
    assert len(got.runs) == 1 and apart(plain.model, got.runs[0].model) == 0
    assert got.history['accuracy 0'].equals(plain.history.accuracy)

@pytest.mark.parametrize('method', [SOLO(), SOLO() + FedProx(mu=.1), SOLO() + MOON()], ids=repr)
def test_who_exchanges_nothing_trains_as_if_all_had_the_same_network(method):
    nets = three()
    got = run(nets, method, participation=.5)
    for net in dict.fromkeys(nets):
        same = run(net, method, participation=.5)
        for k in (k for k, n in enumerate(nets) if n is net): assert apart(same.network(k), got.network(k)) < 1e-6

@pytest.mark.parametrize('method', [FedDF(steps=5), DSFL(steps=5), FedProto()], ids=repr)
def test_a_server_hears_of_others_when_none_of_its_own_takes_part(method):
    nets = [*three(), Dense(32)]
    got = run(nets, method, rounds=1, participation=.17) # one client
    assert got.history.participants.tolist() == [1]
    for (before, _), one in zip(by_network(nets, 6), got.runs):
        if isinstance(method, FedProto): assert one.state.server['FedProto']['known'].any()
        else: assert apart(one.model, before) > 0

def test_a_run_of_a_method_that_is_nowhere_to_be_found_is_loaded_with_it(tmp_path):
    class Here(FedAvg): pass
    got = run(nets := [*three(), Dense(32)], Here() + FedDF(steps=2), rounds=1, checkpoint=tmp_path/'run')
    with pytest.raises(ValueError, match='pass the method'): MixedRun.load(tmp_path/'run', nets)
    again = MixedRun.load(tmp_path/'run', nets, method=Here() + FedDF(steps=2))
    assert again.method == got.method and again.history['accuracy'].equals(got.history['accuracy'])

def test_a_checkpoint_goes_on(tmp_path):
    nets, method, folder = [*three(), Dense(32)], MOON() + FedDF(steps=5), tmp_path/'run'
    whole = run(nets, method, 3)
    first = run(nets, method, 2, checkpoint=folder)
    assert len(list(folder.iterdir())) == 4 and first.round == 2
    (folder/'round-3-network-0-of-4.safetensors').write_bytes(b'') # killed between two files
    got = run(nets, method, 3, checkpoint=folder)
    assert all(apart(a.model, b.model) == 0 for a, b in zip(whole.runs, got.runs))
    again = MixedRun.load(folder, nets)
    assert again.round == 3 and again.who == got.who and again.history['accuracy'].equals(got.history['accuracy'])
    assert run(nets, method, 3, checkpoint=folder).round == 3 # nothing is left to do
    with pytest.raises(ValueError, match='checkpoint of another run'): run(nets, FedDF(), 3, checkpoint=folder)

def test_clients_are_tested_with_their_own_network():
    got = run(three(), DSFL(steps=5), rounds=1)
    tests = [torch.arange(20*k, 20*k + 20) for k in range(6)]
    table = got.per_client(TASK, tests)
    x = TASK.normalise(TASK.x_test)
    for k in range(6):
        with torch.no_grad(): right = got.network(k).eval()(x[tests[k]])[1].argmax(-1) == TASK.y_test[tests[k]]
        assert abs(table.personal[k] - right.double().mean()) < 1e-6
    assert table.network.tolist() == [0, 1, 2, 0, 2, 2]
    assert 'accuracy 2' in got.history and '3 networks' in repr(got)
    with pytest.raises(ValueError, match='there is no client 6; the clients are 0 to 5'): got.network(6)

@pytest.mark.parametrize('method', [FedAvg(), SCAFFOLD(), FedPer(), MOON(), FedAMP(), FedCAC()], ids=repr)
def test_an_average_of_different_networks_is_refused(method):
    with pytest.raises(ValueError, match='clients with different networks have no common one'): run(three(), method)

def test_what_cannot_be_is_said():
    nets = three()
    with pytest.raises(ValueError, match='model has 4 networks for 6 clients'): run(nets[:4], SOLO())
    with pytest.raises(ValueError, match='Clock'): run(nets, SOLO(), participation=Clock(answers=2))
    with pytest.raises(ValueError, match='torchrun'): run(nets, SOLO(), executor='torchrun')
    with pytest.raises(ValueError, match='features of one size'): run([Dense(features=8), *nets[1:]], FedProto())
    with pytest.raises(TypeError, match='it must be one network'): next(federating(nets, TASK, CLIENTS, SOLO()))

def test_a_consensus_digested_by_all():
    "FedMD: labels of the public samples first, then in each round the mean of all logits, by absolute error."
    nets, method = three(), FedMD(samples=150, epochs=2, batch_size=64, transfer=1)
    labels = TASK.y_train[600:800]
    got, own, said = run(nets, method, proxy=(PROXY, labels)), dict(enumerate(map(copy.deepcopy, nets))), None
    at = torch.arange(200)
    for r in range(2):
        rng, n, epochs = np.random.default_rng(r), (200 if said is None else 150), (1 if said is None else 2)
        batches = [i for _ in range(epochs) for i in torch.from_numpy(rng.permutation(n)).split(64)]
        for net in own.values():
            opt = torch.optim.Adam(net.train().parameters(), method.lr)
            for i in batches:
                opt.zero_grad()
                (F.cross_entropy(net(PROXY[i])[1], labels[i]) if said is None else
                 F.l1_loss(net(PROXY[at[i]])[1], said[i])).backward()
                opt.step()
        own = {k: trained(net, k, r) for k, net in own.items()}
        with Seeded(('merge', 0, r)): at = torch.randperm(200, generator=torch.Generator())[:150]
        with torch.no_grad(): said = torch.stack([net(PROXY[at])[1] for net in own.values()]).mean(0)
    for k, net in own.items(): assert apart(net, got.network(k)) < 2e-5
    assert all((one.state.server['FedMD']['said'] - said).abs().max() < 2e-5 for one in got.runs)
    with pytest.raises(ValueError, match='transfer needs labels'): run(nets, method)

def test_the_history_has_the_columns_of_the_runs():
    "Means over clients, of the round where it is about the round; seconds add up to those that pass."
    right = dict(right=lambda logits, y: (logits.argmax(1) == y).double().mean())
    tests = [torch.arange(20*k, 20*k + 20) if k != 2 else torch.arange(0) for k in range(6)]
    task, began = TASK.validation(.1), time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore') # client 2 has no tests
        got = federate([*three(), Dense(32)], task, CLIENTS, DSFL(steps=5), 2, LOCAL, .5, proxy=PROXY, tests=tests,
                       progress=False, device='cpu', metrics=right)
    h, runs = got.history, [r.history for r in got.runs]
    assert h.seconds.sum() < time.perf_counter() - began
    assert {'train_loss', 'right', 'validation', 'validation_personal', 'personal', 'right_personal'} <= set(h)
    assert abs(h.personal.iloc[-1] - got.per_client(task, tests).personal.mean()) < 1e-9
    each = [(r.participants[1], r.train_loss[1]) for r in runs if r.participants[1]]
    assert abs(h.train_loss[1] - sum(n*v for n, v in each)/sum(n for n, _ in each)) < 1e-9
    assert abs(h.right[1] - sum(len(w)*r.right[1] for w, r in zip(got.who, runs))/6) < 1e-9
    assert (h['right'] == h.accuracy).all() and h.participants.tolist() == [3, 3]

def test_a_promise_of_privacy_is_that_for_the_client_who_has_said_most():
    pytest.importorskip('dp_accounting')
    got = run(three(), SOLO() + DPSGD(), rounds=1, participation=.17) # one client
    assert got.history.epsilon[0] == max(r.history.epsilon[0] for r in got.runs) > 0

def test_a_mean_over_participants_is_over_those_with_tests():
    "Every client takes part, so it is what `per_client` says; and what one round ends with, the next begins with."
    tests = [torch.arange(0, 60), *[torch.arange(0)]*2, torch.arange(60, 80), torch.arange(80, 200), torch.arange(9)]
    with pytest.warns(UserWarning, match='no test samples'):
        got = run(three(), SOLO(), rounds=2, tests=tests)
        some = run(three(), DSFL(steps=5), rounds=2, tests=tests, participation=.34)
    h, each = got.history, got.per_client(TASK, tests)
    assert h.personal_after.iloc[-1] == pytest.approx(h.personal.iloc[-1])
    assert h.personal.iloc[-1] == pytest.approx(each.personal.mean())
    for of in (h, some.history): assert of.accuracy_before[1] == pytest.approx(of.accuracy[0])

def test_who_has_the_largest_loss_is_known_of_each_client_on_its_own_network():
    nets, how = three(), PowerOfChoice(.34, candidates=6)
    got = run(nets, SOLO(), participation=how, rounds=1, keep_locals=True)
    with torch.no_grad():
        losses = [F.cross_entropy(net(TASK.normalise(TASK.x_train[i]))[1], TASK.y_train[i])
                  for net, i in zip(nets, CLIENTS)]
    most = torch.stack(losses).argsort(descending=True)[:2].tolist()
    assert sorted(k for one in got.locals for k in one['who']) == sorted(most)
    later = run(nets, DSFL(steps=2), participation=PowerOfChoice(.34), rounds=4)
    assert later.history.participants.tolist() == [2]*4

@pytest.mark.parametrize('first', [SCAFFOLD(), FedDyn()], ids=lambda m: m.name)
def test_a_server_that_counts_all_clients_is_refused_where_it_hears_from_some(first):
    both, net = first + FedDF(steps=1), Dense()
    with pytest.raises(ValueError, match=f'part of {first.name}.*counts all clients'): run(three(), both)
    assert run([net]*6 + [Dense(32)], both, rounds=1).round == 1 # all clients have one network

@pytest.mark.parametrize('first', [FedAsync(), FedNova(), FedAdam(), CoordinateMedian(), FedPer(), MOON()],
                         ids=repr)
def test_parts_that_do_not_ask_about_others_rest_where_nobody_takes_part(first):
    got = run([*three(), Dense(32)], first + FedDF(steps=5), rounds=2, participation=.34)
    assert all(torch.isfinite(v).all() for one in got.runs for v in one.state.params.values())

def test_the_servers_own_network_and_who_had_which(tmp_path):
    nets, own = three(), Dense(32)
    got = run([*nets, own], FedDF(steps=5), rounds=1)
    assert got.network() is got.runs[-1].network() or apart(got.network(), got.runs[-1].model) == 0
    with pytest.raises(ValueError, match='the server has no network of its own'): run(nets, SOLO(), rounds=1).network()
    run(nets, SOLO(), rounds=1).save(tmp_path)
    with pytest.raises(ValueError, match='other clients had these networks'):
        MixedRun.load(tmp_path, [nets[1], nets[0], *nets[2:]])

def test_what_one_network_refuses_several_refuse(tmp_path):
    nets, file = three(), tmp_path/'file'
    file.write_text('', encoding='utf-8')
    for kw, why in ((dict(minutes=1), 'needs checkpoint='), (dict(minutes='x', checkpoint=file), 'must be a number'),
                    (dict(progress=3), 'True or False'), (dict(checkpoint=file), 'must be a folder'),
                    (dict(checkpoint=5), 'the name of a file')):
        with pytest.raises((TypeError, ValueError), match=why): run(nets, SOLO(), **kw)
    with pytest.raises(ValueError, match='file is a file'): run(nets, SOLO(), checkpoint=file/'run')
    for networks, kw in (([*nets, Dense(features=8)], {}), ([Dense(features=8), *nets[1:]], dict(participation=.17))):
        with pytest.raises(ValueError, match='features of one size'): run(networks, FedProto(), **kw)
    with pytest.raises(ValueError, match='every sample needs one'):
        run(nets, FedMD(transfer=1), proxy=(PROXY, TASK.y_train[:3]))
    run([nets[0]]*6, FedAvg(), rounds=1) # who all have one network may average it

def test_an_interrupted_run_is_in_the_exception():
    nets, count, method = three(), [0], DSFL(steps=5)
    class Stops(DSFL):
        def merge(self, delta, server, trained, params, buffers, forward, proxy, round, peers=None):
            count[0] += 1
            if count[0] == 5: raise KeyboardInterrupt # the second group in the second round
            return DSFL.merge(self, delta, server, trained, params, buffers, forward, proxy, round, peers)
    with pytest.raises(KeyboardInterrupt, match='interrupted after round 1 of 2') as e: run(nets, Stops(steps=5))
    first = run(nets, method, rounds=1)
    assert e.value.run.round == 1 and all(apart(a.model, b.model) == 0 for a, b in zip(first.runs, e.value.run.runs))

def test_a_batch_of_one_public_sample_is_left_out_under_batchnorm():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    run(wrap(net, '4'), FedMD(samples=65, batch_size=64), rounds=2)

def test_the_best_round_of_all_networks_together():
    task = load('digits').subset(200, seed=0).validation(.2)
    clients = list(torch.arange(160).split(40))
    small, large = (build('mlp', task, seed=0, hidden=(h,)) for h in (8, 16))
    run = federate([small]*2 + [large]*2, task, clients, SOLO(), 3, local=Local(epochs=1), progress=False)
    h = run.history
    assert run.best()['validation'] == h.validation.max()
    assert run.rounds_to(h.accuracy.iloc[0]) == 1 and run.rounds_to(1.1) is None
    with pytest.raises(ValueError, match='no column'): run.best('nothing')
    assert run.plot().get_ylabel() == 'test accuracy (share)'

def test_a_representation_goes_from_the_server_to_all():
    "FedET as its paper has it: a class is taught to the server's own network, whose head the others take over."
    nets, own = three(), Dense(32, 32)
    method = FedET(steps=20, form='paper', shared='head')
    got, kinds = run([*nets, own], method), by_network([*nets, own], 6)
    for r in range(2):
        after = {k: trained(net, k, r) for net, who in kinds for k in who}
        said = opinions(after.values())
        sure = F.one_hot(consensus(said).argmax(-1), 10)
        large = student(kinds[-1][0], ((sure + .05*diversity(said).softmax(-1))/1.05).clamp(min=1e-12).log(), method, r)
        kinds = [(average([after[k] for k in who], [len(CLIENTS[k]) for k in who]) if who else large, who)
                 for _, who in kinds]
        for net, _ in kinds: net.head.load_state_dict(large.head.state_dict())
    for (net, _), one in zip(kinds, got.runs): assert apart(net, one.model) < 2e-5

def test_networks_are_tested_with_what_they_have_taken_over():
    nets, how = [*three(), Dense(32, 32)], dict(method=FedET(steps=2, shared='head'), rounds=2, participation=.34)
    got, seldom = run(nets, **how), run(nets, **how, evaluate_every=2)
    x, y = TASK.normalise(TASK.x_test), TASK.y_test
    for one, other in zip(got.runs, seldom.runs):
        assert one.history.accuracy[1] == pytest.approx(accuracy(one.model(x)[1], y))
        assert one.history.accuracy_before[1] == other.history.accuracy_before[1]

def test_the_paper_of_fedet_teaches_only_the_network_that_no_client_has():
    "A network whose clients all rest in a round stays as it is."
    nets, own = three(), Dense(32, 32)
    got = run([*nets, own], FedET(steps=2, form='paper'), rounds=1, participation=.17)
    rest = [apart(one.model, net) == 0 for (net, _), one in zip(by_network([*nets, own], 6), got.runs)]
    assert sum(rest) == 2 and not rest[-1]

def test_what_is_shared_must_fit():
    with pytest.raises(ValueError, match="shared='nose', but the server's own network has no such part"):
        run([*three(), Dense(32, 32)], FedET(steps=2, shared='nose'))
    with pytest.raises(ValueError, match=r'body.* is shared, but .* has none of its shape'):
        run([*three(), Dense(32, 32)], FedET(steps=2, shared='body'))

def test_what_a_run_of_several_networks_answers_and_where_the_rest_is(tmp_path):
    nets, x = [*three(), Dense(32)], TASK.x_test[:50]
    got = pickle.loads(pickle.dumps(run(nets, FedDF(steps=5), rounds=1)))
    for k in (*range(6), None):
        with torch.no_grad(): logits = got.network(k)(TASK.normalise(x))[1]
        assert (got.predict(x, k) == logits.argmax(1)).all() and torch.allclose(got.logits(x, client=k), logits)
        file = got.save_model(tmp_path/f'{k}.safetensors', k)
        assert all(torch.equal(v, got.state_dict(k)[n]) for n, v in load_file(file).items())
    for name in ('report', 'without', 'influence', 'federation', 'model', 'no_such_name'):
        with pytest.raises(AttributeError, match=fr"no '{name}'; run.runs\[0\].* `federate` with the list of networks"):
            getattr(got, name)
    given = dict(task=TASK, clients=CLIENTS, proxy=PROXY)
    assert got.runs[0].report(tmp_path/'run.html', **given).exists()
    with pytest.raises(ValueError, match='one of several networks'): got.runs[0].without(0, model=nets[0], **given)

def test_a_folder_of_another_number_of_networks_is_refused(tmp_path):
    nets, two = three(), [*three()[:1]*3, *three()[2:3]*3]
    run(two, SOLO(), rounds=2, checkpoint=tmp_path)
    there = sorted(tmp_path.iterdir())
    for f in (lambda: run(nets, SOLO(), rounds=1, checkpoint=tmp_path), lambda: MixedRun.load(tmp_path, nets)):
        with pytest.raises(ValueError, match='more or fewer networks, 2 and not 3'): f()
    assert sorted(tmp_path.iterdir()) == there

def test_two_processes_in_one_folder(tmp_path):
    pytest.importorskip('fcntl')
    with lock_folder(tmp_path), pytest.raises(BlockingIOError, match=f'another process.*{re.escape(str(tmp_path))}'):
        run(three(), SOLO(), rounds=1, checkpoint=tmp_path)
    assert not list(tmp_path.iterdir()) and run(three(), SOLO(), rounds=1, checkpoint=tmp_path).round == 1

def test_a_sample_of_clients_with_different_networks_counts_for_all_of_them():
    pytest.importorskip('dp_accounting')
    a, b, _ = dict.fromkeys(three())
    ask = dict(task=TASK, clients=[range(60), range(40, 99)], method=SOLO() + DPSGD(), rounds=2, local=LOCAL,
               progress=False, device='cpu')
    several, one = federate([a, b], **ask), federate(a, **ask)
    assert several.history.epsilon.tolist() == one.history.epsilon.tolist() != several.runs[1].history.epsilon.tolist()

def test_a_metric_that_is_undefined_for_some_clients_is_the_mean_over_the_others():
    def nines(logits, y): return (logits.argmax(1) == 9)[y == 9].double().mean()
    first = [torch.nonzero(TASK.y_test == c)[:, 0] for c in range(10)]
    tests = [first[9] if k in (0, 3, 1) else first[k] for k in range(6)]
    with pytest.warns(UserWarning, match='undefined .NaN. for clients 2, 4, 5'):
        got = run(three(), SOLO(), rounds=1, tests=tests, metrics=dict(nines=nines))
    each = got.per_client(TASK, tests, dict(nines=nines))
    assert got.last['nines_personal'] == pytest.approx(each.nines_personal[[0, 1, 3]].mean())
    assert got.last['nines_personal_after'] == pytest.approx(got.last['nines_personal'])
