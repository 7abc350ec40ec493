"Small federations that the tests share: fixed batches, ragged clients, a network with BatchNorm."
import os, sys
os.environ.setdefault('KINETO_LOG_LEVEL', '99') # torch 2.15 otherwise reports every profile, and that there is no GPU
from pathlib import Path
import pytest, torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
# tests on data sets that are not there are skipped
DATA = Path(os.environ.get('FEDLIT_DATA', Path(__file__).parents[1]/'data'))
# the same cases in every run; HYPOTHESIS_PROFILE=default looks for new ones
settings.register_profile('steady', derandomize=True)
settings.load_profile(os.environ.get('HYPOTHESIS_PROFILE', 'steady'))

torch.set_num_threads(1) # fixtures of a module come before those of a test

@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)
