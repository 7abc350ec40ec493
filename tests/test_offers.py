"A real round offers to every hook what the table of `fedlit.vocabulary` says, and nothing else."
import inspect, re
import pytest, torch
import fedlit.methods
from federation import model
from fedlit.laws import small_world
from fedlit.method import Method, needs, wants
from fedlit.methods import DPSGD
from fedlit.cohort import Broadcast
from fedlit.round import fed_round
from fedlit.server import deploy_network, network_for
from fedlit.state import pure, start
from fedlit.vocabulary import BETWEEN, HOOKS, OFFERS, OUTSIDE, SERVER

WHEN_ASKED = {'data', 'labels', 'counts'} # they cost something, so they are made only where a hook asks for them
AT_SERVER = {'received', 'staleness'} # likewise, of each client of a round
# there only where a client has a part of the network, a place of a batch is empty, or others have another network
SOMETIMES = {'live_features', 'valid', 'peers', 'peer_uploads'}

def probe(hook, *names):
    "A method whose `hook` asks for these names."
    code = f"def {hook}(self, {', '.join(names)}): raise LookupError(sorted(k for k in locals() if k != 'self'))"
    space = {}
    exec(code, space)
    return type('Probe', (Method,), {hook: space[hook], '__annotations__': {}})()

def one_round(method):
    "A round, and the network of a client after it."
    world, one = small_world(), small_world().data(0)
    new = fed_round(Broadcast(method, world.model, start(method, world.model, world.clients), world.local,
                              proxy=world.proxy), world.cohort(0), one, world.sizes)
    x, asks = one['x'][0, 0], str([inspect.signature(getattr(method, h)) for h in BETWEEN])
    data = (x, one['y'][0, 0]) if 'data' in asks else None
    net, answer = deploy_network(method, new, 0, data, world.model)
    if answer: answer(*pure(world.model)(*net, x)[1::-1], x)

def offered(hook):
    with pytest.raises(TypeError, match='Offered') as e: one_round(probe(hook, 'nonsense'))
    return set(re.findall(r"'(\w+)'", str(e.value).split('Offered:')[1]))

@pytest.mark.parametrize('hook', HOOKS)
def test_a_round_offers_what_the_table_says(hook):
    rows = {n for n, o in OFFERS.items() if hook in o.hooks}
    assert offered(hook) == rows - WHEN_ASKED - SOMETIMES - (AT_SERVER if hook in SERVER else set())

@pytest.mark.parametrize('hook,name', [(h, n) for n in sorted(WHEN_ASKED | AT_SERVER) for h in OFFERS[n].hooks])
def test_what_costs_something_is_made_where_it_is_asked_for(hook, name):
    with pytest.raises(LookupError, match=name): one_round(probe(hook, name))

def test_a_part_of_the_network_says_which_features_live():
    seen = []
    class Half(Method):
        def mask(self, axes): return {a: torch.arange(n) < n/2 for a, n in axes.size.items()}
        def loss(self, live_features=None):
            seen.append(live_features)
            return 0.
    one_round(Half())
    assert seen and all(v is not None and 0 < v.sum() < len(v) for v in seen)

def test_outside_of_training_use_gets_what_a_method_can_rely_on():
    net = model()
    for who in (None, 0):
        with pytest.raises(LookupError, match=re.escape(str(sorted(OUTSIDE)))):
            network_for(probe('use', *OUTSIDE), start(probe('use', *OUTSIDE), net, 3), who)
    with pytest.raises(TypeError, match='used outside of training too: lr=None'):
        network_for(probe('use', 'lr'), start(probe('use', 'lr'), net, 3))

@pytest.mark.parametrize('name', OFFERS)
def test_every_row_says_what_it_is(name):
    row = OFFERS[name]
    assert set(row.hooks) <= set(HOOKS) and row.shape and len(row.meaning) > 8

@pytest.mark.parametrize('hook', HOOKS)
def test_every_hook_has_an_example_a_neutral_version_and_names_that_there_are(hook):
    row = HOOKS[hook]
    method = getattr(fedlit.methods, row.example.split()[0])
    assert getattr(method, hook) is not getattr(Method, hook) # it overrides what is neutral
    assert set(row.asks.split()) <= set(OFFERS) and row.where in ('start', 'client', 'step', 'server', 'between')

def test_a_hook_without_a_row_is_refused():
    with pytest.raises(TypeError, match='rest is not a hook'):
        type('Mine', (Method,), {'rest': lambda self: 0})

def test_hooks_that_a_method_leaves_neutral_ask_for_nothing():
    assert not [n for n in OFFERS if wants(Method(), n) or needs(Method(), n)]

def test_every_name_is_offered_to_a_hook():
    assert [n for n, o in OFFERS.items() if not o.hooks] == []

def test_a_wrong_name_is_answered_by_the_table():
    for hook, name, said in (('grad', 'logits', "'logits' is offered to output, loss"),
                             ('loss', 'feature', 'did you mean features')):
        with pytest.raises(TypeError, match=re.escape(said)): one_round(probe(hook, name))

COVERED = { # by DPSGD's noise, or nothing that a sample decides; whoever adds a name decides where it belongs
    'params', 'buffers', 'fixed', 'received', 'initial', 'criterion', 'valid', 'features', 'logits', 'frozen',
    'forward', 'train', 'model', 'keeps', 'name', 'module', 'grads', 'delta', 'others', 'deltas', 'trained', 'peers',
    'peer_uploads', 'server', 'proxy', 'client', 'mask', 'uploads', 'weights', 'participants', 'staleness', 'clients',
    'generator', 'steps', 'kept', 'lr', 'momentum', 'nesterov', 'weight_decay', 'number', 'epochs', 'seed', 'round',
    'first', 'step', 'axes', 'watch', 'chosen', 'share', 'live_features'}

def test_what_DPSGD_lets_other_methods_see_was_decided():
    seen = {n for n, o in OFFERS.items() if not DPSGD().refuses(probe(o.hooks[0], n), before=False)}
    assert seen == COVERED
