"The statistics behind the verdicts: exact, calibrated, and valid when one looks again; larger than on the page."
import itertools, math
import numpy as np, pytest
from scipy import stats
from fedlit.papers.evidence import (FEW, LEVEL, capital, interval, next_run, paired_test, seeds_needed,
                                    sequential_interval, sequential_seeds, sequential_test, sign_flips, subset_means,
                                    together)
from fedlit.papers.claims import ahead, minus, evaluate

def draws(times, n, seed=0):
    rng = np.random.default_rng(seed)
    return dict(normal=rng.standard_normal((times, n)), laplace=rng.laplace(size=(times, n)),
                cauchy=rng.standard_cauchy((times, n)), signs=rng.choice([-1., 1.], (times, n)),
                growing=rng.standard_normal((times, n))*1.2**np.arange(n))

def most(share, times): return share + 4*math.sqrt(share*(1-share)/times)

@pytest.mark.parametrize('n', [2, 6, 9])
def test_the_sign_flip_test_counts_all_signs(n):
    d = np.random.default_rng(n).standard_normal(n) + .4
    sums = np.array([np.dot(s, d) for s in itertools.product((-1, 1), repeat=n)])
    assert sign_flips(d) == pytest.approx(min(1, 2*min((sums >= d.sum() - 1e-12).mean(),
                                                       (sums <= d.sum() + 1e-12).mean())))

@pytest.mark.parametrize('unit', [100/359, 1/3, .1])
def test_patterns_as_far_out_as_ours_count_however_their_sums_are_rounded(unit):
    rng = np.random.default_rng(0)
    for n in (6, 8, 10)*8:                               # accuracies are multiples of a share, so sums are often equal
        k, base = rng.integers(-3, 5, n), rng.integers(0, 300, n)
        signs = np.array([*itertools.product((-1, 1), repeat=n)])
        exact = (abs(signs@k) >= abs(k.sum())).mean()
        assert sign_flips((base + k)*unit - base*unit) == pytest.approx(exact, abs=1e-9), k

def test_the_smallest_p_value_and_who_judges():
    assert [paired_test(np.arange(1., n+1)).test for n in (1, 2, 5, 6, 9)] == ['one seed', 't', 't', *['sign flips']*2]
    assert sign_flips(np.ones(FEW-1)) > LEVEL >= sign_flips(np.ones(FEW))
    assert paired_test([1., 1., 1.]) == (.25, 1, 'sign flips')          # no spread: t would call it certain
    assert paired_test([1., 1. + 1e-15, 1.]).test == 'sign flips'
    assert paired_test([-1., -1.1, -.9]).side == -1 and paired_test([0., 0., 0.]) == (1., 0, 'sign flips')

@pytest.mark.parametrize('n', [3, 5, 6, 8])
def test_false_alarms_of_one_look(n):
    times = 1000
    for name, d in draws(times, n).items():
        if n < FEW and name != 'normal': continue                   # t assumes it
        alarms = np.mean([paired_test(row).p <= LEVEL for row in d])
        assert alarms <= most(LEVEL, times), (name, alarms)
        if n == 3: assert alarms > LEVEL/2                          # it does fire

@pytest.mark.parametrize('n', [3, 5, 6, 7, 11])
def test_the_interval_is_what_the_test_does_not_reject(n):
    d = np.random.default_rng(n).standard_normal(n)*3 + 1
    low, high = interval(d)
    step = 1e-6*(high - low)
    for c in (low + step, high - step): assert paired_test(d - c).p > LEVEL - 1e-4
    for c in (low - step, high + step): assert paired_test(d - c).p <= LEVEL + 1e-4

def test_the_interval_with_many_and_with_one():
    d = np.random.default_rng(0).standard_normal(40) + .5
    low, high = interval(d)
    t = stats.ttest_1samp(d, 0).confidence_interval()
    assert abs(low - t.low) < .1 and abs(high - t.high) < .1 and len(subset_means(d)) == 2**16 - 1
    assert all(map(math.isnan, interval([3.])))

@pytest.mark.parametrize('effect', [.9, 1.2, 1.7])
def test_the_seeds_that_are_promised(effect):
    d = np.array([-1., 0, 1]) + effect
    n, rng = int(seeds_needed(d)), np.random.default_rng(1)
    found = np.mean([paired_test(rng.standard_normal(n) + effect).p <= LEVEL for _ in range(500)])
    assert .7 < found < .93
    assert seeds_needed(d, LEVEL/20) > n                          # among many claims it takes more

def test_seeds_needed_at_the_edges():
    assert math.isnan(seeds_needed([2.]))
    assert math.isinf(seeds_needed([1., -1., 0.])) and math.isinf(seeds_needed([0.]*3))
    assert seeds_needed([1., 1., 1.]) == 6 and seeds_needed([1., 1., 1.], LEVEL/100) == 12
    assert seeds_needed([1e9, 1e9 + 1, 1e9 - 1]) == 4             # one more than there are
    assert seeds_needed([.1, 1.9, 2.], null=1.) > seeds_needed([.1, 1.9, 2.])

def test_many_claims():
    rng = np.random.default_rng(0)
    assert np.isnan(together([math.nan, .01])[0]) and together([math.nan, .01])[1] == .01 and len(together([])) == 0
    wrong = []
    for _ in range(300):                                           # ten claims, four of them true
        d = rng.standard_normal((10, 8)) + 2*(np.arange(10) < 4)[:, None]
        decided = together([paired_test(row).p for row in d]) <= LEVEL
        wrong.append(decided[4:].sum()/max(1, decided.sum()))
    assert np.mean(wrong) <= LEVEL

def test_the_game_is_fair():
    sizes = np.random.default_rng(3).lognormal(size=9)
    signs = np.array(list(itertools.product((-1., 1.), repeat=9)))
    assert np.allclose(capital(signs*sizes).mean(1), 1, atol=1e-12)
    assert np.array_equal(capital(np.zeros(4)), np.ones((2, 4)))

@pytest.mark.parametrize('kind', list(draws(1, 2)))
def test_false_alarms_stay_at_the_level_when_one_looks_after_every_seed(kind):
    times = 20000
    d = draws(times, 80, seed=5)[kind]
    assert (2/capital(d).max((0, -1)) <= LEVEL).mean() <= most(LEVEL, times)

def test_a_claim_that_is_worse_than_empty_is_not_called_true():
    d = draws(20000, 80, seed=6)['normal'] - .1
    assert (2/capital(d)[0].max(-1) <= LEVEL).mean() <= LEVEL/2

def test_what_the_sequential_test_says():
    d = np.random.default_rng(0).standard_normal(30) + 1
    p = [sequential_test(d[:n]).p for n in range(1, 31)]
    assert p == sorted(p, reverse=True) and p[-1] <= LEVEL          # what is decided stays decided
    assert sequential_test(d).side == 1 and sequential_test(-d) == (sequential_test(d).p, -1, 'sequential')
    assert sequential_test(np.ones(6)).p > LEVEL >= sequential_test(np.ones(7)).p

@pytest.mark.parametrize('kind', ['normal', 'laplace', 'signs'])
def test_the_sequential_interval_misses_seldom_however_often_one_looks(kind):
    d = draws(150, 40, 3)[kind] + 2
    missed = [any(not low <= 2 <= high for low, high in (sequential_interval(row[:n]) for n in (7, 15, 25, 40)))
              for row in d]
    assert np.mean(missed) <= most(LEVEL, 150)
    assert all(sequential_interval(row)[0] > -math.inf for row in d)

def test_the_sequential_interval_at_the_edges():
    assert all(map(math.isnan, sequential_interval([1.])))
    assert sequential_interval([1., 2., 3.]) == (-math.inf, math.inf)     # no game is won in three rounds
    low, high = sequential_interval([2.]*12)
    assert abs(low - 2) < 1e-3 and abs(high - 2) < 1e-3
    d = np.random.default_rng(1).normal(1, 1, 30)
    low, high = sequential_interval(d)
    assert (sequential_test(d).p <= LEVEL) == (low > 0)
    assert np.allclose(np.subtract(sequential_interval(100*d + 7), 7)/100, (low, high), atol=1e-3)

def test_the_seeds_of_the_sequential_test_are_those_it_takes():
    rng = np.random.default_rng(5)
    d = rng.normal(.6, 1, 10)
    n = sequential_seeds(d)
    later = np.concatenate([np.tile(d, (2000, 1)), rng.normal(d.mean(), d.std(ddof=1), (2000, int(n) - 10))], 1)
    assert n > seeds_needed(d) and abs(np.mean((2/capital(later).max((0, -1))) <= LEVEL) - .8) < .06
    assert math.isnan(sequential_seeds([1.])) and sequential_seeds([-1., 1.]*10) == math.inf

def test_where_a_new_run_lies_has_bounds_and_needs_a_spread():
    assert next_run([99., 98., 97.], least=0, most=100)[1] == 100 and next_run([1., 9., 3.], least=0)[0] == 0
    assert all(map(math.isnan, next_run([64., 64., 64.])))
    low, high = next_run([100., 100., 99.5, 100.]*5, least=0, most=100)
    assert 95 < low < 99.5 and high == 100                            # also where most are on a bound
    assert next_run([0., 100.], least=0, most=100) == (0, 100)

def test_between_two_bounds_it_is_the_interval_of_the_logit():
    from scipy.special import expit, logit
    v = np.random.default_rng(0).normal(1, .3, 12)
    low, high = (logit((b + .01)/1.02) for b in next_run(expit(v), least=0, most=1))
    wide = (expit(v) + .01)/1.02
    assert np.allclose((low, high), next_run(logit(wide))) and np.isclose(low + high, 2*logit(wide).mean())
    left, right = next_run([90., 95., 97., 98., 98.5, 96.], least=0, most=100)
    mean = np.mean([90., 95., 97., 98., 98.5, 96.])
    assert mean - left > 2*(right - mean) # the tail is long where there is room
    assert np.allclose(next_run(100 - np.array([90., 95., 97.]), least=0, most=100)[::-1],
                       100 - np.array(next_run([90., 95., 97.], least=0, most=100)))

@pytest.mark.parametrize('n', [5, 20])
def test_one_run_in_a_thousand_lies_outside(n):
    from scipy.special import expit
    d = 100*expit(np.random.default_rng(0).normal(3, .6, (20000, n + 1)))
    x = np.log((d + 1)/(101 - d))                                     # next_run for all rows at once
    half = stats.t.isf(.0005, n-1)*x[:, :n].std(1, ddof=1)*math.sqrt(1 + 1/n)
    assert np.allclose([next_run(r[:n], least=0, most=100)[0] for r in d[:20]],
                       np.clip(102/(1 + np.exp(half - x[:, :n].mean(1))) - 1, 0, 100)[:20])
    assert (abs(x[:, n] - x[:, :n].mean(1)) > half).mean() <= most(.001, 20000)

def test_a_difference_of_claims_takes_the_seeds_that_both_have():
    import pandas as pd
    every = [dict(method=m, alpha=a, seed=s) for a in (.1, .5, 1.) for m in 'AB' for s in range(9)]
    there = [l for l in every if l['alpha'] == .1 or l['seed'] < 4 or l['method'] == 'A' and l['seed'] == 4]
    rng = np.random.default_rng(0)
    rows = pd.DataFrame([dict(l, accuracy_late=50 + 10*(l['method'] == 'B') + rng.normal()) for l in there])
    rows.attrs.update(labels=['method', 'alpha', 'seed'])
    gain = lambda a: ahead(dict(method='B', alpha=a), dict(method='A', alpha=a))
    claims = {'more': minus(gain(.1), gain(.5))}
    missing = [(l, None) for l in every if l not in there]
    assert [len(w.differences) for w in evaluate(claims, rows, missing)] == [4]
