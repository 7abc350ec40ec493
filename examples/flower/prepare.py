"""Throw-away keys and certificates, and digits split into one folder a site: python prepare.py FOLDER --sites 5"""
import argparse, ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization as ser
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

def _write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(data)

def _pem(key): return key.private_bytes(ser.Encoding.PEM, ser.PrivateFormat.PKCS8, ser.NoEncryption())

def _certificate(name, key, issuer, signer, *extensions):
    start = datetime.now(UTC) - timedelta(hours=1)
    named = lambda n: x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n)])
    made = x509.CertificateBuilder(named(issuer), named(name), key.public_key(), x509.random_serial_number(),
                                   start, start + timedelta(days=30))
    for e in extensions: made = made.add_extension(e, critical=isinstance(e, x509.BasicConstraints))
    return made.sign(signer, hashes.SHA256()).public_bytes(ser.Encoding.PEM)

def certificates(folder, name='throw-away CA'):
    "A certificate authority, and the server's key and certificate for 127.0.0.1: ca.crt, server.key, server.crt."
    folder, ca, key = Path(folder), ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    never = ('digital_signature content_commitment key_encipherment data_encipherment '
             'key_agreement encipher_only decipher_only').split()
    usage = x509.KeyUsage(**dict.fromkeys(never, False), key_cert_sign=True, crl_sign=True)
    there = x509.SubjectAlternativeName([x509.DNSName('localhost'), x509.IPAddress(ipaddress.ip_address('127.0.0.1'))])
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.public_key())
    itself = x509.SubjectKeyIdentifier.from_public_key(ca.public_key())
    _write(folder/'ca.crt', _certificate(name, ca, name, ca,
                                         x509.BasicConstraints(ca=True, path_length=0), usage, itself))
    _write(folder/'server.crt', _certificate('SuperLink', key, name, ca,
                                             x509.BasicConstraints(ca=False, path_length=None), there, signed_by))
    _write(folder/'server.key', _pem(key))

def site_key(path):
    "The key pair by which the server knows a site: PATH and PATH.pub."
    key = ec.generate_private_key(ec.SECP384R1())
    _write(Path(path), key.private_bytes(ser.Encoding.PEM, ser.PrivateFormat.OpenSSH, ser.NoEncryption()))
    _write(Path(f'{path}.pub'), key.public_key().public_bytes(ser.Encoding.OpenSSH, ser.PublicFormat.OpenSSH))

def split(folder, sites, alpha=.5, seed=0):
    "Digits, one folder a site; returns the task and the parts, for comparisons with the simulation."
    from safetensors.torch import save_file
    from fedlit.data import load
    from fedlit.partition import dirichlet
    task = load('digits')
    parts = dirichlet(task.y_train, clients=sites, alpha=alpha, seed=seed)
    for k, i in enumerate(parts):
        own = Path(folder)/'sites'/str(k)
        own.mkdir(parents=True, exist_ok=True)
        save_file(dict(x=task.x_train[i], y=task.y_train[i]), own/'train.safetensors')
    save_file(dict(x=task.x_test, y=task.y_test), Path(folder)/'test.safetensors')
    return task, parts

if __name__ == '__main__':
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('folder', type=Path)
    p.add_argument('--sites', type=int, default=5)
    p.add_argument('--alpha', type=float, default=.5, help='of the Dirichlet partition')
    a = p.parse_args()
    certificates(a.folder/'keys')
    for k in range(a.sites): site_key(a.folder/'keys'/f'site{k}')
    task, parts = split(a.folder, a.sites, a.alpha)
    print(f'{a.folder}: keys, and {len(task.y_train)} digits at {a.sites} sites:', *map(len, parts))
