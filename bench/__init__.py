"Speed of fedlit beside a plain loop and three libraries: `python -m bench` on a CPU, `python -m bench.gpu` on a GPU."
