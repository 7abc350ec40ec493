"fedjax: its federated_averaging, whose for_each_client is compiled by JAX (the jit backend)."
import time
import numpy as np
import fedjax, jax, jax.numpy as jnp
from fedjax.algorithms.fed_avg import federated_averaging
from .child import Clock, cohort, main

def linear(p, name, x): return x @ p[f'{name}.weight'] + p[f'{name}.bias']

def conv(p, name, x):
    x = jax.lax.conv_general_dilated(x, p[f'{name}.weight'], (1, 1), 'SAME',
                                     dimension_numbers=('NHWC', 'HWIO', 'NHWC')) + p[f'{name}.bias']
    return jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), 'VALID')

def mlp(p, x):
    x = jax.nn.relu(linear(p, 'one', x.reshape(len(x), -1)))
    return linear(p, 'head', jax.nn.relu(linear(p, 'two', x)))

def cnn(p, x):
    x = conv(p, 'two', conv(p, 'one', x)).reshape(len(x), -1)
    return linear(p, 'head', jax.nn.relu(linear(p, 'three', x)))

def to_jax(start):
    "torch's weights in JAX's layouts: channels last, inputs before outputs."
    def one(name, v):
        if v.ndim == 4: return v.transpose(2, 3, 1, 0)
        if name == 'three.weight': v = v.reshape(512, 64, 7, 7).transpose(0, 2, 3, 1).reshape(512, -1)
        return v.T if v.ndim == 2 else v
    return {k: jnp.asarray(one(k, v)) for k, v in start.items()}

def to_torch(params): # the dense layers, which is what is scored
    return {k: np.asarray(v).T if v.ndim == 2 else np.asarray(v) for k, v in params.items()}

def run(work, data, options):
    net = dict(mlp=mlp, cnn=cnn)[work['net']]
    def loss(params, batch, rng):
        z = jax.nn.log_softmax(net(params, batch['x']))
        return -jnp.take_along_axis(z, batch['y'][:, None], 1).mean()
    x = data.x.transpose(0, 2, 3, 1)
    clients = [fedjax.ClientDataset({'x': x[p], 'y': data.y[p].astype(np.int32)}) for p in data.parts]
    batches = fedjax.ShuffleRepeatBatchHParams(batch_size=work['batch'], num_epochs=work['epochs'])
    algorithm = federated_averaging(jax.grad(loss), fedjax.optimizers.sgd(work['lr'], momentum=work['momentum']),
                                    fedjax.optimizers.sgd(1.), batches)
    state, key, clock = algorithm.init(to_jax(data.start)), jax.random.PRNGKey(work['seed']), Clock()
    for r in range(work['rounds']):
        who = cohort(work, r)
        key, *keys = jax.random.split(key, len(who) + 1)
        state, _ = algorithm.apply(state, [(k, clients[k], u) for k, u in zip(who, keys)])
        jax.block_until_ready(state.params)
        clock.lap()
    end, samples = time.time(), sum(len(b['y']) for k in who for b in clients[k].shuffle_repeat_batch(batches))
    return dict(seconds=clock.seconds, ended=end, samples=samples, weights=to_torch(state.params),
                threads=options['threads'])

if __name__ == '__main__': main(run)
