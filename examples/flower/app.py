"What runs at the sites and on the server; the rest is in pyproject.toml."
from fedlit.flower import client_app, server_app

client = client_app()
server = server_app()
