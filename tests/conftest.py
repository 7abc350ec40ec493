"Small federations that the tests share: fixed batches, ragged clients, a network with BatchNorm."
import sys
from pathlib import Path
import pytest, torch

sys.path.insert(0, str(Path(__file__).parent))
SHARED = Path(__file__).parents[2]/'shared'/'data'

@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)
