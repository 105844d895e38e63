import importlib
import json
import re
import sys

import pytest

from mtserve_plugin import dependencies
from mtserve_plugin.errors import MissingDependencyError

PARTS = ["python", "torch", "cuda", "fbgemm", "torchrec", "native", "cpu", "gpu", "nvcc"]


@pytest.fixture
def site(tmp_path):
    """A folder of fake packages; importing any of them fails."""

    class Site:
        path = (str(tmp_path),)

        def package(self, name, **files):
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").write_text("raise ImportError('a diagnosis must not import')")
            for file, text in files.items():
                (folder / file.replace("__", ".")).write_text(text)
            return folder

        def distribution(self, name, version):
            folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

        def torch(self, version, cuda=None, hip=None):
            fields = f"cuda: Optional[str] = {cuda!r}\nhip: Optional[str] = {hip!r}\n"
            source = f"__version__ = '{version}'\ndebug = False\n{fields}"
            self.package("torch", version__py=source)
            self.distribution("torch", version)

        def fbgemm(self, version, variant, *names):
            docs = self.package("fbgemm_gpu") / "docs"
            docs.mkdir(exist_ok=True)
            target = {"version": version, "target": "default", "variant": variant}
            (docs / "target.default.json.py").write_text(json.dumps(target))
            for name in names:
                self.distribution(name, version)

        def torchrec(self, version):
            self.package("torchrec")
            self.distribution("torchrec", version)

        def find(self, name):
            findings = {finding.name: finding for finding in dependencies.diagnose(self.path)}
            assert list(findings) == PARTS
            return findings[name]

    return Site()


CPU, CUDA = ("2.13.0+cpu", None), ("2.13.0+cu130", "13.0")


@pytest.mark.parametrize(
    ("torch", "version", "variant", "names", "status", "text", "fix"),
    [
        (CPU, "1.8.0", "cpu", ["fbgemm-gpu-cpu"], "ok", "fits torch 2.13.0", ""),
        (CUDA, "1.8.0", "cuda", ["fbgemm-gpu"], "ok", "fits", ""),
        (CUDA, "1.8.0", "cpu", ["fbgemm-gpu-cpu"], "warn", "CPU only", '"fbgemm-gpu==1.8.*"'),
        (
            CPU,
            "1.8.0",
            "cuda",
            ["fbgemm-gpu"],
            "error",
            "the cuda build .* cpu build",
            '"fbgemm-gpu-cpu==1.8.*"',
        ),
        (
            CPU,
            "1.8.0",
            "cuda",
            ["fbgemm-gpu", "fbgemm-gpu-cpu"],
            "error",
            "torchrec .* replaced",
            "uninstall -y",
        ),
        (CPU, "1.6.0", "cpu", ["fbgemm-gpu-cpu"], "error", "made for torch 2.11", '"fbgemm-gpu-cpu==1.8.*"'),
        (("2.14.1+cpu", None), "1.8.0", "cpu", [], "error", "made for torch 2.13", '"fbgemm-gpu-cpu==1.9.*"'),
        (("2.15.0", None), "1.9.0", "cpu", [], "error", "made for torch 2.14", '"torch==2.13.*" && '),
        (("2.15.0", None), "2.1.0", "cpu", [], "warn", "untested", ""),
        (CPU, "2.1.0", "cpu", [], "error", "not known to fit", '"fbgemm-gpu-cpu==1.8.*"'),
        (CPU, "2026.11.2", "cpu", [], "ok", "fits", ""),
        (CPU, "1.8.0", "rocm", [], "error", "the rocm build", "fbgemm-gpu-cpu"),
    ],
)
def test_fbgemm_variants(site, torch, version, variant, names, status, text, fix):
    site.torch(*torch)
    site.fbgemm(version, variant, *names)
    finding = site.find("fbgemm")
    assert finding.status == status
    assert re.search(text, finding.text)
    assert fix in finding.fix
    assert status != "ok" or not finding.fix
    assert version in finding.version


def test_a_metadata_only_stand_in_for_fbgemm_gpu_is_not_the_cuda_build(site):
    site.torch(*CPU)
    site.fbgemm("1.8.0", "cpu", "fbgemm-gpu-cpu")
    site.distribution("fbgemm-gpu", "1.8.0+cpu")
    assert site.find("fbgemm").status == "ok"


def test_an_empty_environment(site):
    assert [site.find(name).status for name in ("torch", "fbgemm", "torchrec", "native")] == ["error"] * 4
    site.torch(*CPU)
    assert "is not installed" in site.find("fbgemm").text
    assert "fbgemm-gpu-cpu==1.8.*" in site.find("torchrec").fix
    site.package("fbgemm_gpu")
    assert site.find("fbgemm").status == "warn"


@pytest.mark.parametrize(
    ("torch", "version", "status"),
    [
        ("2.13.0", "1.9.2", "ok"),
        ("2.11.0", "1.9.2", "warn"),
        ("2.14.0", "1.7.0", "warn"),
        ("2.13.0", "1.2.0", "error"),
    ],
)
def test_torchrec_versions(site, torch, version, status):
    site.torch(torch)
    site.torchrec(version)
    assert site.find("torchrec").status == status


def test_the_cuda_library_is_missed_only_where_torch_has_cuda(site):
    folder = site.package("mtserve_plugin")
    (folder / "_core.abi3.so").touch()
    site.torch(*CUDA)
    assert (site.find("native").status, site.find("cuda").version) == ("warn", "13.0")
    (folder / "_ops_cuda.so").touch()
    assert site.find("native").status == "ok"


def test_cpu_features(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    for flags, status, found in (
        ("sse4_2", "warn", ""),
        ("avx2 avx512f avx512_bf16 amx_bf16 amx_tile", "ok", "avx2 avx512 avx512_bf16 amx"),
    ):
        cpuinfo.write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\n")
        finding = {f.name: f for f in dependencies.diagnose(cpuinfo=str(cpuinfo))}["cpu"]
        assert (finding.status, finding.version) == (status, found)


@pytest.mark.parametrize(("toolkit", "status"), [("13.1", "warn"), ("13.0", "ok"), ("12.8", "ok")])
def test_a_toolkit_newer_than_that_of_torch(site, tmp_path, monkeypatch, toolkit, status):
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {toolkit}, V{toolkit}.88'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    site.torch(*CUDA)
    finding = site.find("nvcc")
    assert (finding.status, finding.version) == (status, toolkit)


@pytest.fixture
def fresh(site, monkeypatch):
    """Makes the fake packages the ones that `require_*` finds."""
    for name in [n for n in sys.modules if n.split(".")[0] in ("fbgemm_gpu", "torchrec")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(site.path[0])
    importlib.invalidate_caches()
    monkeypatch.setattr(dependencies, "_require", dependencies._require.__wrapped__)
    return site


def test_require_explains_a_wrong_variant_before_importing_it(fresh, monkeypatch):
    fresh.torch(*CPU)
    beside_a_cpu_torch = dependencies._torch_facts(fresh.path)
    monkeypatch.setattr(dependencies, "_torch_facts", lambda path: beside_a_cpu_torch)
    fresh.fbgemm("1.8.0", "cuda", "fbgemm-gpu")
    fresh.torchrec("1.9.2")
    for require, name in (
        (dependencies.require_fbgemm, "fbgemm_gpu"),
        (dependencies.require_torchrec, "torchrec"),
    ):
        with pytest.raises(MissingDependencyError, match=f"{name} cannot be used: the cuda build.*Fix: pip"):
            require()
        assert name not in sys.modules


def test_require_explains_a_failing_import(fresh):
    fresh.fbgemm("1.8.0", "cpu", "fbgemm-gpu-cpu")
    with pytest.raises(MissingDependencyError, match=r"does not import \(a diagnosis.*Fix: pip uninstall"):
        dependencies.require_fbgemm()


def test_require_returns_what_is_installed():
    assert dependencies.require_torchrec() is sys.modules["torchrec"]
    assert dependencies.require_fbgemm() is sys.modules["fbgemm_gpu"]
