"fedlit.partition: exactness, determinism, the promises of each rule, and errors that say what would be right."
import math, random
import numpy as np, pytest, torch
from hypothesis import HealthCheck, given, settings, strategies as st
from fedlit import scores
from fedlit.data import Task, load
from fedlit.partition import (by_domain, classes_per_client, concept_shift, counts, dirichlet, dirichlet_mixture,
                              heterogeneity, iid, match, quantity_skew, shards, show_partition)

Y = np.random.default_rng(0).integers(0, 10, 1200)
INF = float("inf")
ALL = dict(
    iid=lambda y, K, s: iid(y, K, seed=s),
    even=lambda y, K, s: dirichlet(y, K, INF, seed=s, min_size=0),
    released=lambda y, K, s: dirichlet(y, K, .3, seed=s, min_size=0),
    printed=lambda y, K, s: dirichlet(y, K, .05, seed=s, form="paper"),
    rebalanced=lambda y, K, s: dirichlet(y, K, .05, seed=s, form="rebalanced"),
    quantity=lambda y, K, s: quantity_skew(y, K, .3, seed=s),
    shards=lambda y, K, s: shards(y, K, 1, seed=s),
    by_domain=lambda y, K, s: by_domain(y, seed=s),
    classes=lambda y, K, s: classes_per_client(y, K, 2, seed=s),
    pure=lambda y, K, s: shards(y, K, 2, seed=s, pure=True),
    mixture=lambda y, K, s: dirichlet_mixture(y, K, train=50, seed=s)[0],
    match=lambda y, K, s: match(iid(y, K), y, y, seed=s))
thousand, hundreds, quick = (settings(max_examples=n, deadline=None, suppress_health_check=list(HealthCheck))
                             for n in (1000, 250, 40))

def every_once(parts, n): return torch.equal(torch.cat(parts).sort()[0], torch.arange(n))

@pytest.mark.parametrize("name", ALL)
def test_the_seed_is_all_the_chance_there_is(name):
    np.random.seed(0)
    torch.manual_seed(0)
    random.seed(0)
    a = ALL[name](Y, 10, 3)
    assert len(a) == 10 and are_parts_of(Y, a)
    x = np.random.rand(), torch.rand(1).item(), random.random()
    np.random.seed(1)
    torch.manual_seed(1)
    b, c = ALL[name](torch.from_numpy(Y), 10, 3), ALL[name](Y.tolist(), 10, 3)
    assert all(torch.equal(p, q) and torch.equal(p, r) for p, q, r in zip(a, b, c))
    np.random.seed(0)
    torch.manual_seed(0)
    random.seed(0)
    assert x == (np.random.rand(), torch.rand(1).item(), random.random())  # the global generators did not move
    if name != "by_domain":
        assert any(len(p) != len(q) or not torch.equal(p, q) for p, q in zip(a, ALL[name](Y, 10, 4)))

@quick
@given(alpha=st.floats(.05, 5), K=st.integers(2, 10), seed=st.integers(0, 99))
def test_cap_and_restart(alpha, K, seed):
    parts = dirichlet(Y, K, alpha, seed=seed)
    t = counts(parts, Y)
    assert every_once(parts, len(Y))
    assert t.sum(1).min() >= 10
    before = t.cumsum(1) - t  # held before each class
    assert (t[before * K >= len(Y)] == 0).all()

def test_rebalanced_is_the_released_partition_where_no_restart_was_needed():
    same = 0
    for seed in range(40):
        parts = dirichlet(Y, 10, .05, seed=seed, form="rebalanced")
        try: released = dirichlet(Y, 10, .05, seed=seed, restarts=1)
        except ValueError: continue
        same += 1
        assert all(map(torch.equal, parts, released))
    assert 0 < same < 40

def test_a_loan_changes_as_little_as_it_can():
    for seed in range(20): # the rule with min_size=0 is the table before the loan
        before, after = (counts(dirichlet(Y, 50, .05, seed=seed, min_size=n, form="rebalanced"), Y) for n in (0, 10))
        lacks = (10 - before.sum(1)).clamp(min=0)
        assert (after - before).clamp(min=0).sum() == lacks.sum() > 0 # what was lent is what was lacking
        assert torch.equal(after.sum(1)[lacks > 0], torch.full((int((lacks > 0).sum()),), 10))
        assert ((after >= before) | (lacks[:, None] == 0)).all() # only the others lend

@quick
@given(alpha=st.floats(1e-320, 1e308) | st.just(INF), K=st.integers(1, 60), least=st.integers(0, 20),
       seed=st.integers(0, 99))
def test_quantity_skew(alpha, K, least, seed):
    parts = quantity_skew(Y, K, alpha, seed=seed, min_size=least)
    assert every_once(parts, len(Y))
    n = [len(p) for p in parts]
    assert len(n) == K and min(n) >= least
    if alpha == INF: assert max(n) - min(n) <= 1

def test_sizes_are_dirichlet_and_labels_are_not_skewed():
    n = np.array([[len(p) for p in quantity_skew(Y, 10, .5, seed=s, min_size=0)] for s in range(400)]) / len(Y)
    assert n.mean() == pytest.approx(.1) and n.var() == pytest.approx(.1 * .9 / 6, rel=.15)
    # among the samples of a client, classes occur as in a random draw without replacement
    q, share = np.bincount(Y) / len(Y), []
    for s in range(100):
        big = max(quantity_skew(Y, 10, .1, seed=s), key=len)
        if len(big) < len(Y) - 100: share.append(np.bincount(Y[big.numpy()], minlength=10) / len(big) - q)
    assert len(share) > 50 and np.abs(np.mean(share, 0)).max() < 4 * np.std(share) / len(share)**.5

@quick
@given(G=st.integers(2, 10), M=st.integers(2, 10), seed=st.integers(0, 99))
def test_concepts(G, M, seed):
    digits = load("digits")
    if M < G:
        with pytest.raises(ValueError, match=f"classes={M} must be a whole number between {G} and 10"):
            concept_shift(digits, G, M, seed)
        return
    task = concept_shift(digits, G, M, seed)
    assert isinstance(task, Task) and len(task.domains) == G and task.x_train is digits.x_train
    for part in ("train", "test"):
        old, new, g = getattr(digits, f"y_{part}"), getattr(task, f"y_{part}"), getattr(task, f"domain_{part}")
        table = torch.zeros(G, 10, 10, dtype=torch.int64).index_put_((g, old, new), torch.tensor(1), True)
        assert ((table > 0).sum(2) == 1).all() # a concept has one name for a class ...
        read = table.argmax(2)
        assert (read.sort(1)[0] == torch.arange(10)).all() # ... and one class for a name
        assert sum(len(c.unique()) == G for c in read.T) == M # they differ on M classes and agree on the others
        assert sum(len(c.unique()) == 1 and c[0] == k for k, c in enumerate(read.T)) == 10 - M
        each = table.sum(2)
        assert (each.max(0)[0] - each.min(0)[0] <= 1).all() # the pictures of a class are divided evenly
    parts = by_domain(task.domain_train, 2 * G)
    assert every_once(parts, len(task.y_train))
    for p, t in zip(parts, scores.tests_of(task, parts)):
        assert task.domain_train[p].unique().tolist() == task.domain_test[t].unique().tolist()
    again = concept_shift(digits, G, M, seed)
    assert torch.equal(again.y_train, task.y_train) and torch.equal(again.domain_test, task.domain_test)

def test_a_task_with_domains_takes_no_concepts():
    with pytest.raises(ValueError, match="digits_domains has domains already"): concept_shift(load("digits_domains"))

def test_paper_form_has_neither():
    tables = [counts(dirichlet(Y, 10, .01, seed=s, form="paper"), Y) for s in range(30)]
    assert any(t.sum(1).min() == 0 for t in tables)
    assert any((t[(t.cumsum(1) - t) * 10 >= len(Y)] > 0).any() for t in tables)

def test_shares_are_dirichlet():
    y = np.zeros(10_000, int)
    p = torch.stack([counts(dirichlet(y, 5, 2., seed=s, form="paper"), y)[:, 0] for s in range(400)]) / 1e4
    mean, var = 1 / 5, (1 / 5) * (4 / 5) / (5 * 2 + 1)
    assert (p.mean(0) - mean).abs().max() < 4 * (var / 400)**.5 and p.var() == pytest.approx(var, rel=.15)

@quick
@given(alpha=st.floats(.1, 50) | st.just(INF), K=st.integers(1, 12), seed=st.integers(0, 99))
def test_mixture(alpha, K, seed):
    a, b = dirichlet_mixture(Y, K, alpha, 60, 20, y_test=Y, seed=seed)
    p, q = counts(a, Y), counts(b, Y)
    assert (p.sum(1) == 60).all() and (q.sum(1) == 20).all() and ((p / 60 - q / 20).abs() < 1 / 60 + 1 / 20).all()
    assert dirichlet_mixture(Y, K, alpha, 60, seed=seed)[1] is None
    if alpha == INF: assert (p == 6).all()

def test_domains():
    d = torch.tensor([3, 1, 1, 3, 1, 1])
    assert [p.tolist() for p in by_domain(d)] == [[1, 2, 4, 5], [0, 3]]
    parts = by_domain(d, clients=4)
    assert every_once(parts, 6)
    assert [set(d[p].tolist()) for p in parts] == [{1}, {1}, {3}, {3}]
    assert [p.tolist() for p in by_domain(["b", "a"])] == [[1], [0]]

def test_match_of_one_client_ignores_the_others():
    parts = iid(Y, 4)
    y_test = Y[:300]
    assert torch.equal(match(parts, Y, y_test)[0], match(parts[:1] + [parts[3]], Y, y_test)[0])

@pytest.mark.parametrize("parts", [iid(Y, 10), shards(Y, 100), iid(Y, 1)])
def test_pictures(parts):
    show_partition(parts, Y, title="t").figure.canvas.draw()

@pytest.mark.parametrize("call,says", [
    (lambda: iid(Y, 0), "clients=0 .* between 1 and 1200"),
    (lambda: iid(Y, 1201), "clients=1201 .* 1200"),
    (lambda: iid(Y, 2.5), "clients=2.5"),
    (lambda: iid([]), "non-empty"),
    (lambda: iid(torch.eye(4)), "one label a sample"),
    (lambda: iid([.5, 1.]), "whole numbers"),
    (lambda: iid([0, -1]), "0 or more"),
    (lambda: dirichlet(Y, min_size=121), "min_size=121 .* between 0 and 120"),
    (lambda: dirichlet(Y, form="code"), "form='code' .*released"),
    (lambda: dirichlet(Y, restarts=0), "restarts=0"),
    (lambda: dirichlet(Y, 50, 1e-6, restarts=5), "none of 5 tables .*; form=\"rebalanced\" always does"),
    (lambda: dirichlet(Y, 10, min_size=121, form="rebalanced"), "min_size=121 .* between 0 and 120"),
    (lambda: quantity_skew(Y, 10, min_size=121), "min_size=121 .* between 0 and 120"),
    (lambda: quantity_skew(Y, alpha=0), "alpha=0 "),
    (lambda: quantity_skew(Y, clients=0), "clients=0"),
    (lambda: concept_shift(load("digits"), 11), "concepts=11 must be a whole number between 2 and 10"),
    (lambda: classes_per_client(Y, classes=11), "classes=11 .* between 1 and 10"),
    (lambda: classes_per_client([0, 0, 0, 0, 1], 4, 2), "class 1 has too few samples, 1, for its 4 owners"),
    (lambda: shards(Y, 100, 13), "shards_per_client=13 .* between 1 and 12"),
    (lambda: shards(Y, 4, 2, pure=True), "at least 10 shards"),
    (lambda: dirichlet_mixture(Y, train=1300), "lower train=1300 or raise alpha"),
    (lambda: dirichlet_mixture(Y, train=20, test=90, y_test=Y[:100]), "lower test=90"),
    (lambda: by_domain([0, 1] * 5, 3), "clients=3 .* multiple of the 2 domains, such as 4"),
    (lambda: by_domain([0] * 9 + [1], 4), "2 per domain, but the smallest has 1"),
    (lambda: match(iid(Y, 3), Y, Y[Y != 7]), "class 7"),
    (lambda: counts(iid(Y, 3), Y, classes=9), "classes=9 .* at least 10"),
])
def test_errors_name_the_value_and_the_remedy(call, says): # that a value is named is tried a thousand times below
    with pytest.raises(ValueError, match=says): call()

# ---- over a thousand generated cases each ----

def row(classes, low=1, high=48):
    "Labels with gaps, few or many of a class."
    return st.tuples(st.binary(min_size=low, max_size=high), st.integers(1, classes), st.integers(1, 3)).map(
        lambda b: np.frombuffer(b[0], np.uint8).astype(np.int64) % b[1]*b[2])

labels, seeds, number = row(6), st.integers(0, 2**64), st.integers(-1, 12)
alphas = st.sampled_from([0., -1., math.nan, math.inf, 1e-300, .05, .5, 1., 100., 1e308]) | st.floats(.01, 20)

ANSWERED, REFUSED, EITHER = 'answered', 'refused', 'answered or refused'

def blames_an_argument(error, arguments):
    "Does the message name an argument with its value, or the class or client that makes pure shards impossible?"
    said = str(error)
    return (any(f'{k}={v!r}' in said or f'{k}={v}' in said for k, v in arguments.items())
            or 'pure shards' in said)

def are_parts_of(y, parts):
    "Is every part a rising vector of different places in `y`?"
    return all(p.dtype == torch.int64 and p.dim() == 1 and (p.diff() > 0).all()
               and (len(p) == 0 or 0 <= p[0] and p[-1] < len(y)) for p in parts)

def ask(split, y, outcome, **arguments):
    "What `split` makes of the labels, the same a second time; None if it refuses. `outcome` says which is right."
    try: parts = split(y, **arguments)
    except ValueError as e:
        assert outcome != ANSWERED, f'{arguments}: {e}'
        assert blames_an_argument(e, arguments), f'{e} does not name one of {arguments}'
        return None
    assert outcome != REFUSED, f'{arguments} got an answer'
    again = split(torch.from_numpy(y), **arguments)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True)) and are_parts_of(y, parts)
    return parts

def sizes(parts): return [len(p) for p in parts]

@thousand
@given(labels, number, seeds)
def test_iid(y, clients, seed):
    parts = ask(iid, y, ANSWERED if 1 <= clients <= len(y) else REFUSED, clients=clients, seed=seed)
    if parts is None: return
    assert every_once(parts, len(y)) and len(parts) == clients
    assert max(sizes(parts)) - min(sizes(parts)) <= 1

@thousand
@given(labels, number, alphas, seeds, st.integers(-1, 4), st.sampled_from(['released', 'paper', 'rebalanced']))
def test_dirichlet(y, clients, alpha, seed, least, form):
    "The released form draws until everybody has `least` samples, and may not find such a table; rebalanced lends them."
    promised = form != 'paper'
    possible = 1 <= clients <= len(y) and alpha > 0 and (not promised or 0 <= least <= len(y)//clients)
    outcome = REFUSED if not possible else EITHER if form == 'released' else ANSWERED
    parts = ask(dirichlet, y, outcome, clients=clients, alpha=alpha, seed=seed, min_size=least, form=form, restarts=5)
    if parts is None: return
    assert every_once(parts, len(y)) and len(parts) == clients
    if promised: assert min(sizes(parts)) >= least
    if alpha == math.inf: assert all(np.ptp(n) <= 1 for n in (sizes(parts), *counts(parts, y).numpy().T))

@thousand
@given(labels, number, st.integers(0, 7), seeds)
def test_classes_per_client(y, clients, classes, seed):
    in_all = np.bincount(y)
    possible = 1 <= clients <= len(y) and 1 <= classes <= (in_all > 0).sum()
    parts = ask(classes_per_client, y, EITHER if possible else REFUSED, clients=clients, classes=classes, seed=seed)
    if parts is None: return
    table, dealt = counts(parts, y).numpy(), np.concatenate(parts)
    owners = (table > 0).sum(0)[in_all > 0]
    assert ((table > 0).sum(1) == classes).all() and len(set(dealt)) == len(dealt)
    assert np.ptp(owners) <= 1 and (owners > 0).sum() == min(len(owners), clients*classes)
    for c in np.flatnonzero(table.sum(0)): # a class that somebody has is dealt out evenly, and whole
        shares = table[:, c][table[:, c] > 0]
        assert shares.sum() == in_all[c] and shares.max() - shares.min() <= 1

@thousand
@given(labels, number, st.integers(0, 5), seeds, st.booleans())
def test_shards(y, clients, each, seed, pure):
    possible = 1 <= clients <= len(y) and 1 <= each <= len(y)//clients
    outcome = REFUSED if not possible else EITHER if pure else ANSWERED
    parts = ask(shards, y, outcome, clients=clients, shards_per_client=each, seed=seed, pure=pure)
    if parts is None: return
    assert every_once(parts, len(y)) and len(parts) == clients and min(sizes(parts)) >= each
    if pure: assert ((counts(parts, y) > 0).sum(1) <= each).all()
    else: assert max(sizes(parts)) - min(sizes(parts)) <= each

@thousand
@given(labels, row(6), number, alphas, st.integers(0, 20), st.integers(0, 9), seeds)
def test_dirichlet_mixture(y, y_test, clients, alpha, train, test, seed):
    def both_sides(y, **arguments):
        return [p for side in dirichlet_mixture(y, y_test=y_test, **arguments) for p in side]
    possible = clients >= 1 and alpha > 0 and train >= 1 and test >= 1
    parts = ask(both_sides, np.concatenate([y, y_test]), EITHER if possible else REFUSED,
                clients=clients, alpha=alpha, train=train, test=test, seed=seed)
    if parts is None: return
    assert sizes(parts) == [train]*clients + [test]*clients
    assert all(p[-1] < len(y_test) for p in parts[clients:])

@thousand
@given(labels, st.none() | st.integers(-1, 20), seeds)
def test_by_domain(y, clients, seed):
    domains, smallest = len(set(y.tolist())), np.unique(y, return_counts=True)[1].min()
    possible = clients is None or (1 <= clients <= len(y) and clients % domains == 0
                                   and clients//domains <= smallest)
    parts = ask(by_domain, y, ANSWERED if possible else REFUSED, clients=clients, seed=seed)
    if parts is None: return
    assert every_once(parts, len(y)) and len(parts) == (clients or domains)
    assert all(len(set(y[p.numpy()])) == 1 for p in parts)

@thousand
@given(labels, labels, st.integers(1, 6), seeds)
def test_match(y, y_test, clients, seed):
    "Test parts with the proportions of the training parts, up to one sample a class."
    train = dirichlet(y, min(clients, len(y)), .5, seed=0, form='paper')
    table = counts(train, y).numpy()
    there = np.bincount(y_test, minlength=table.shape[1])[:table.shape[1]]
    try: parts = match(train, y, y_test, seed=seed)
    except ValueError as e:
        assert (table[:, there == 0] > 0).any() and 'class' in str(e)
        return
    for part, wanted in zip(parts, table, strict=True):
        got = np.bincount(y_test[part.numpy()], minlength=len(wanted))
        got, unknown = got[:len(wanted)], got[len(wanted):]
        assert len(set(part.tolist())) == len(part) and (got[wanted == 0] == 0).all() and unknown.sum() == 0
        if not wanted.any():
            assert len(part) == 0
            continue
        assert (abs(got - wanted*len(part)/wanted.sum()) < 1).all()
        assert (wanted*(len(part) + 1) > there*wanted.sum()).any() # one more would not fit

@hundreds
@given(labels, st.integers(1, 12), alphas.filter(lambda a: a > 0), seeds)
def test_heterogeneity_is_the_mean_distance_from_the_labels_of_all(y, clients, alpha, seed):
    q, clients = np.bincount(y)/len(y), min(clients, len(y))
    for parts in (iid(y, clients, seed=seed), dirichlet(y, clients, alpha, form='paper', seed=seed), by_domain(y)):
        mean = sum(len(p)/len(y)*abs(np.bincount(y[p.numpy()], minlength=len(q))/len(p) - q).sum()/2
                   for p in parts if len(p))
        assert heterogeneity(parts, y) == pytest.approx(mean, abs=1e-9)
    assert mean == pytest.approx(1 - (q**2).sum()) # a class each: the most there is

WRONG = st.sampled_from([
    None, [], 3, 'abc', ['a', 'b'], [0., 1.], [[0, 1]], [-1, 2], [True, False], [math.nan], [10**12], [2**63],
    [[0], [1, 2]], {}, torch.zeros(0), torch.tensor([.5])])
SPLITS = dict(iid=iid, dirichlet=dirichlet, classes=classes_per_client, shards=shards,
              mixture=lambda y, clients, **kw: dirichlet_mixture(y, clients, train=1, **kw))

@hundreds
@given(st.sampled_from(sorted(SPLITS)),
       st.tuples(st.just('y'), WRONG)
       | st.tuples(st.just('clients'), st.sampled_from([1.5, '3', None, -2, 0, 10**30]))
       | st.tuples(st.just('seed'), st.sampled_from([-1, 1.5, None, 'a', [1, 2]])))
def test_input_that_is_no_partition_is_refused_by_name(split, wrong):
    "Labels that are none, clients and seeds that are no whole numbers: a ValueError that names the value."
    given = dict(y=[0, 1]*12, clients=2, seed=2**70)
    SPLITS[split](**given)
    with pytest.raises(ValueError) as e: SPLITS[split](**{**given, wrong[0]: wrong[1]})
    assert ('y has' in str(e.value) if wrong[0] == 'y'
            else f'{wrong[0]}={wrong[1]!r} must be a whole number' in str(e.value))
