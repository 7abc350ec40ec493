"Properties over at least a thousand generated cases each: partitions, masks, aggregation, text, files."
import math, os, random, string, struct, tempfile
from dataclasses import fields
from functools import cache
from pathlib import Path
import numpy as np, pandas as pd, pytest, torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call
from fedlit.axes import cut, extract, find_axes, masked, masks, paste, shrunk
from fedlit.method import FedAvg, Method, total
from fedlit.methods import FederatedDropout, FedRolex, FjORD, HeteroFL, OwnLabels
from fedlit.parse import ParseError, known, method as parse
from fedlit.partition import by_domain, classes_per_client, counts, dirichlet, dirichlet_mixture, heterogeneity, iid, match, shards
from fedlit.round import Local, State, aggregate, start
from fedlit.run import FORMAT, Run
from fedlit.table import Store, Table
from fedlit.tree import flatten
from federation import METHODS, SUMS, ELSEWHERE

thousand = settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))

# ---- partitions ----

def row(classes, low=1, high=48):
    "Labels with gaps, few or many of a class."
    return st.tuples(st.binary(min_size=low, max_size=high), st.integers(1, classes), st.integers(1, 3)).map(lambda b: np.frombuffer(b[0], np.uint8).astype(np.int64) % b[1]*b[2])

labels, seeds, number = row(6), st.integers(0, 2**64), st.integers(-1, 12)
alphas = st.sampled_from([0., -1., math.nan, math.inf, 1e-300, .05, .5, 1., 100., 1e308]) | st.floats(.01, 20)

def names_a_value(error, **given):
    "Does the message name one of the arguments with the value that was given, or a class or client that makes it impossible?"
    said = str(error)
    return any(f'{k}={v!r}' in said or f'{k}={v}' in said for k, v in given.items()) or 'pure shards' in said

def checked(f, y, may_fail, **kw):
    "The parts, twice the same and from any kind of labels; or None after an error that names a value and was called for."
    try: parts = f(y, **kw)
    except ValueError as e:
        assert names_a_value(e, **kw), f'{e} does not name one of {kw}'
        assert may_fail, f'{kw}: {e}'
        return None
    for again in (f(y.tolist(), **kw), f(torch.from_numpy(y), **kw)): assert all(torch.equal(a, b) for a, b in zip(parts, again))
    assert all(p.dtype == torch.int64 and p.dim() == 1 and (p.diff() > 0).all() and (len(p) == 0 or 0 <= p[0] and p[-1] < len(y)) for p in parts)
    return parts

def once(parts, n): return sorted(i for p in parts for i in p.tolist()) == list(range(n))

@thousand
@given(labels, number, seeds)
def test_iid(y, K, seed):
    parts = checked(iid, y, not 1 <= K <= len(y), clients=K, seed=seed)
    if parts: assert once(parts, len(y)) and len(parts) == K and max(map(len, parts)) - min(map(len, parts)) <= 1

@thousand
@given(labels, number, alphas, seeds, st.integers(-1, 4), st.sampled_from(['released', 'paper']))
def test_dirichlet(y, K, alpha, seed, least, form):
    bad = not 1 <= K <= len(y) or not alpha > 0 or form == 'released' and not 0 <= least <= len(y)//K
    hard = form == 'released' and not bad # a table with `least` samples for everybody may not be found
    parts = checked(dirichlet, y, bad or hard, clients=K, alpha=alpha, seed=seed, min_size=least, form=form, restarts=20)
    if bad: assert parts is None
    elif parts: assert once(parts, len(y)) and len(parts) == K and (form == 'paper' or min(map(len, parts)) >= least)

@thousand
@given(labels, number, st.integers(0, 7), seeds)
def test_classes_per_client(y, K, M, seed):
    parts = checked(lambda y, **kw: classes_per_client(y, **kw), y, True, clients=K, classes=M, seed=seed)
    have = np.bincount(y)
    if not (1 <= K <= len(y) and 1 <= M <= (have > 0).sum()): assert parts is None
    if parts is None: return
    table = counts(parts, y).numpy()
    assert ((table > 0).sum(1) == M).all() and not set(np.concatenate(parts).tolist()) - set(range(len(y)))
    for c in np.flatnonzero(table.sum(0)):
        own = table[:, c][table[:, c] > 0]
        assert own.sum() == have[c] and own.max() - own.min() <= 1

@thousand
@given(labels, number, st.integers(0, 5), seeds, st.booleans())
def test_shards(y, K, s, seed, pure):
    bad = not 1 <= K <= len(y) or not 1 <= s <= len(y)//K
    parts = checked(shards, y, bad or pure, clients=K, shards_per_client=s, seed=seed, pure=pure)
    if bad: assert parts is None
    elif parts: assert once(parts, len(y)) and len(parts) == K and min(map(len, parts)) >= s and (not pure or ((counts(parts, y) > 0).sum(1) <= s).all())

@thousand
@given(labels, row(6), number, alphas, st.integers(0, 20), st.integers(0, 9), seeds)
def test_dirichlet_mixture(y, y_test, K, alpha, train, test, seed):
    f = lambda y, **kw: [p for side in dirichlet_mixture(y, y_test=y_test, **kw) for p in side]
    parts = checked(f, np.concatenate([y, y_test]), True, clients=K, alpha=alpha, train=train, test=test, seed=seed)
    if K < 1 or not alpha > 0 or train < 1 or test < 1: assert parts is None
    elif parts: assert [len(p) for p in parts] == [train]*K + [test]*K and all(p[-1] < len(y_test) for p in parts[K:])

@thousand
@given(labels, st.none() | st.integers(-1, 20), seeds)
def test_by_domain(y, K, seed):
    domains, smallest = len(set(y.tolist())), np.unique(y, return_counts=True)[1].min()
    bad = K is not None and (not 1 <= K <= len(y) or K % domains or K//domains > smallest)
    parts = checked(by_domain, y, bad, clients=K, seed=seed)
    assert (parts is None) == bool(bad)
    if parts is not None: assert once(parts, len(y)) and len(parts) == (K or domains) and all(len(set(y[p.numpy()])) == 1 for p in parts)

@thousand
@given(labels, labels, st.integers(1, 6), seeds, st.none() | st.integers(0, 8))
def test_match(y, y_test, K, seed, size):
    train = dirichlet(y, min(K, len(y)), .5, seed=0, form='paper')
    table = counts(train, y).numpy()
    have = np.bincount(y_test, minlength=table.shape[1])[:table.shape[1]]
    try: parts = match(train, y, y_test, seed=seed, size=size)
    except ValueError as e:
        assert (table[:, have == 0] > 0).any() and 'class' in str(e) or f'size={size!r}' in str(e)
        return
    for part, mine in zip(parts, table):
        got = np.bincount(y_test[part.numpy()], minlength=len(mine))
        assert len(set(part.tolist())) == len(part) and (got[:len(mine)][mine == 0] == 0).all() and got[len(mine):].sum() == 0
        if mine.any(): assert (abs(got[:len(mine)] - mine*len(part)/mine.sum()) < 1).all() and size in (None, len(part))
        else: assert len(part) == 0

@thousand
@given(labels, st.integers(1, 12), alphas.filter(lambda a: a > 0), seeds)
def test_heterogeneity_is_a_distance(y, K, alpha, seed):
    "Between 0 and 1 - sum q^2; the order of clients, of samples in a part and the names of classes change nothing."
    parts = dirichlet(y, min(K, len(y)), alpha, form='paper')
    h, q = heterogeneity(parts, y), np.bincount(y)/len(y)
    assert -1e-9 <= h <= 1 - (q**2).sum() + 1e-9
    chance = np.random.default_rng(seed)
    shuffled, names = [parts[k].flip(0) for k in chance.permutation(len(parts))], chance.permutation(50)
    assert heterogeneity(shuffled, names[y]) == pytest.approx(h) and counts(parts, y).sum() == len(y)

WRONG = st.sampled_from([None, [], 3, 'abc', ['a', 'b'], [0., 1.], [[0, 1]], [-1, 2], [True, False], [math.nan], [10**12], [2**63], [[0], [1, 2]], {}, torch.zeros(0), torch.tensor([.5])])
SPLITS = dict(iid=iid, dirichlet=dirichlet, classes=classes_per_client, shards=shards, mixture=lambda y, clients, **kw: dirichlet_mixture(y, clients, train=1, **kw))

@thousand
@given(st.sampled_from(sorted(SPLITS)), st.tuples(st.just('y'), WRONG) | st.tuples(st.just('clients'), st.sampled_from([1.5, '3', None, -2, 0, 10**30]))
       | st.tuples(st.just('seed'), st.sampled_from([-1, 1.5, None, 'a', [1, 2]])))
def test_input_that_is_no_partition_is_refused_by_name(split, wrong):
    "Labels that are none, clients and seeds that are no whole numbers: a ValueError that names the value."
    given = dict(y=[0, 1]*12, clients=2, seed=2**70)
    SPLITS[split](**given)
    with pytest.raises(ValueError) as e: SPLITS[split](**{**given, wrong[0]: wrong[1]})
    assert 'y has' in str(e.value) if wrong[0] == 'y' else f'{wrong[0]}={wrong[1]!r} must be a whole number' in str(e.value)
