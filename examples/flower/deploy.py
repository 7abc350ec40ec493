"""A SuperLink and its SuperNodes as processes on this machine, with TLS and a key a site: python deploy.py FOLDER

FOLDER is what prepare.py made. Nothing but loopback is used. Logs lie in FOLDER/logs."""
import argparse, os, re, socket, subprocess, sys, time, tomllib
from pathlib import Path
from flwr.supercore.version import package_version

# until 1.39 sites spoke gRPC on a port of their own; since 1.40 HTTPS on the common one
GRPC = tuple(map(int, package_version.split('.')[:2])) < (1, 40)
BIN = Path(os.environ.get('FLWR_BIN') or Path(sys.executable).parent)

def free_ports(n):
    "Ports of 127.0.0.1 that nobody listens on just now."
    holds = [socket.socket() for _ in range(n)]
    for s in holds: s.bind(('127.0.0.1', 0))
    ports = [s.getsockname()[1] for s in holds]
    for s in holds: s.close()
    return ports

def listens(port):
    with socket.socket() as s: return s.connect_ex(('127.0.0.1', port)) == 0

def settings(values):
    "A dictionary as Flower's command line wants it."
    return ' '.join(f'{k}={v}' if isinstance(v, (int, float)) else f'{k}="{v}"' for k, v in values.items())

class Deployment:
    "Processes that are stopped when the `with` block ends."
    def __init__(self, folder):
        self.folder, self.processes = Path(folder).resolve(), {}
        (self.port, self.fleet), self.keys, self.logs = free_ports(2), self.folder/'keys', self.folder/'logs'
        if not GRPC: self.fleet = self.port
        self.logs.mkdir(exist_ok=True)
        home = self.folder/'flwr'
        home.mkdir(exist_ok=True)
        ca = (self.keys/'ca.crt').as_posix()
        here = ('[superlink]\ndefault = "here"\n[superlink.here]\n'
                f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{ca}"\n')
        (home/'config.toml').write_text(here)
        self.env = {**os.environ, 'FLWR_HOME': str(home),
                    'FLWR_TELEMETRY_ENABLED': '0', 'FLWR_DISABLE_UPDATE_CHECK': '1',
                    # all sites share this machine, and what they compute does not depend on its number of cores
                    'OMP_NUM_THREADS': '1',
                    'PATH': f'{BIN}{os.pathsep}{os.environ["PATH"]}'}

    def start(self, name, *command):
        "One process with its log in logs/NAME.log."
        with open(self.logs/f'{name}.log', 'w') as log:
            self.processes[name] = subprocess.Popen([str(v) for v in command], cwd=self.folder, env=self.env,
                                                    stdout=log, stderr=log, start_new_session=True)
        return self.processes[name]

    def superlink(self, simulation=False, seconds=120):
        "The server's side; returns when it listens. With `simulation`, Flower's simulation engine makes the sites."
        tls = ('--ssl-ca-certfile', self.keys/'ca.crt',
               '--ssl-certfile', self.keys/'server.crt',
               '--ssl-keyfile', self.keys/'server.key')
        fleet = (['--simulation'] if simulation else
                 ['--enable-supernode-auth', *(['--fleet-api-address', f'127.0.0.1:{self.fleet}'] if GRPC else [])])
        self.start('superlink', 'flower-superlink', '--host', '127.0.0.1', '--port', self.port, *tls, *fleet,
                   '--disable-runtime-dependency-installation')
        ports, end = {self.port} if simulation else {self.port, self.fleet}, time.monotonic() + seconds
        while time.monotonic() < end and self.processes['superlink'].poll() is None:
            if all(map(listens, ports)): return
            time.sleep(.2)
        raise RuntimeError(f'the SuperLink does not listen; {self.logs}/superlink.log says why')

    def register(self, *names):
        "Tell the SuperLink the public keys of the sites that may join; returns the numbers of their nodes."
        running = [self.start(f'register-{n}', 'flwr', 'supernode', 'register', self.keys/f'{n}.pub', 'here')
                   for n in names]
        if any(p.wait() for p in running):
            raise RuntimeError(f'a site could not be registered; {self.logs}/register-*.log say why')
        said = [re.search(r'SuperNode (\d+) registered', (self.logs/f'register-{n}.log').read_text()) for n in names]
        return ' '.join(m[1] for m in said) if all(said) else ''

    def supernode(self, k, ca=None, key=None, **config):
        "The side of site `k`; `config` is what its ClientApp finds in node_config."
        config = {'partition-id': k, 'folder': str(self.folder/'sites'/str(k)), **config}
        return self.start(f'site{k}', 'flower-supernode', '--superlink', f'127.0.0.1:{self.fleet}',
                          '--root-certificates', ca or self.keys/'ca.crt',
                          '--auth-supernode-private-key', key or self.keys/f'site{k}',
                          '--port', free_ports(1)[0], '--node-config', settings(config))

    def flwr(self, *command):
        "A command of the `flwr` tool; returns what it prints."
        done = subprocess.run(['flwr', *map(str, command)], cwd=self.folder, env=self.env,
                              capture_output=True, text=True)
        if done.returncode: raise RuntimeError(f'flwr {" ".join(map(str, command))}: {done.stdout}{done.stderr}')
        return done.stdout

    def run(self, app, *options, **config):
        "Start the app, with changes to its run config, and return its log when it has ended."
        return self.flwr('run', app, 'here', '--stream', *options,
                         *(['--run-config', settings(config)] if config else []))

    def __enter__(self): return self
    def __exit__(self, *_):
        for name in sorted(self.processes, reverse=True): self.kill(name, 10 if name == 'superlink' else 0)

    def kill(self, name, seconds=0):
        "Stop a process and what it started: at once, or after so many seconds to do it by itself."
        p = self.processes.pop(name)
        if seconds:
            p.terminate()
            try: p.wait(seconds)
            except subprocess.TimeoutExpired: pass
        if os.name == 'nt': subprocess.run(['taskkill', '/F', '/T', '/PID', str(p.pid)], capture_output=True)
        else:
            try: os.killpg(p.pid, 9)
            except ProcessLookupError: pass
        p.wait()

if __name__ == '__main__':
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('folder', type=Path)
    p.add_argument('--app', type=Path, default=Path(__file__).parent)
    a = p.parse_args()
    names = sorted(p.stem for p in (a.folder/'keys').glob('site*.pub'))
    if not names: sys.exit(f'{a.folder}/keys has no keys of sites; `python prepare.py {a.folder} --sites 5` makes them')
    config = tomllib.loads((a.app/'pyproject.toml').read_text())['tool']['flwr']['app']['config']
    with Deployment(a.folder) as d:
        d.superlink()
        nodes = d.register(*names)
        for n in names: d.supernode(int(n.removeprefix('site')))
        print(f'SuperLink on 127.0.0.1:{d.port}, {len(names)} SuperNodes; training ...', flush=True)
        try:
            # as many as the folder has
            print(d.run(a.app.resolve(), clients=len(names), least=min(config['least'], len(names)), nodes=nodes))
        except RuntimeError as e: sys.exit(str(e))
        ended = d.flwr('list', 'here', '--format', 'json')
        if 'finished:completed' not in ended: sys.exit(f'the run failed: {ended}{d.logs}/superlink.log says why')
