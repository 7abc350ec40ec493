"Small federations that the tests share: fixed batches, ragged clients, a network with BatchNorm."
import os, sys
from pathlib import Path
import pytest, torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
SHARED = Path(__file__).parents[2]/'shared'/'data'
settings.register_profile('steady', derandomize=True)   # the same cases in every run; HYPOTHESIS_PROFILE=default looks for new ones
settings.load_profile(os.environ.get('HYPOTHESIS_PROFILE', 'steady'))

@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)
