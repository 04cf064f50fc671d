"""The manifests in deploy/kubernetes: what a cluster takes, and what our programs take."""

import re
from pathlib import Path

import kubernetes_validate
import pytest
import tyro
import yaml

from torchbeast import polybeast_env, polybeast_learner
from torchbeast.run.flags import given_flags

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "deploy/kubernetes"
OBJECTS = [item for path in sorted(FOLDER.glob("*.yaml"))
           for item in yaml.safe_load_all(path.read_text())]  # fmt: skip
POD_KINDS = ("Job", "Deployment")
OLDEST, NEWEST = "1.27", kubernetes_validate.latest_version()


def name_of(item):
    return f"{item['kind']}/{item['metadata']['name']}"


def find(kind):
    return [item for item in OBJECTS if item["kind"] == kind]


def pods():
    return {item["kind"]: item["spec"]["template"] for item in OBJECTS if item["kind"] in POD_KINDS}


def container(kind):
    [found] = pods()[kind]["spec"]["containers"]
    return found


def flags_of(kind):
    """Parsed as the program in the container would."""
    _, m, module = container(kind)["command"]
    assert m == "-m"
    args = container(kind)["args"]
    if module == "torchbeast.polybeast_env":
        return vars(tyro.cli(polybeast_env.Flags, args=args))
    assert module == "torchbeast.polybeast_learner"
    return given_flags(polybeast_learner.Flags, args)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("item", OBJECTS, ids=name_of)
def test_manifests_fit_kubernetes_own_schemas(item, version):
    kubernetes_validate.validate(item, version, strict=True)


def test_the_schemas_find_a_mistake():
    [job] = find("Job")
    wrong = {**job, "spec": {**job["spec"], "backofLimit": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, NEWEST, strict=True)


def test_workers_dial_the_port_of_the_service_that_leads_to_the_learner():
    [service] = find("Service")
    [port] = service["spec"]["ports"]
    learner, workers = flags_of("Job"), flags_of("Deployment")
    assert workers["connect"] == f"{service['metadata']['name']}:{port['port']}"
    assert learner["listen"].endswith(f":{container('Job')['ports'][0]['containerPort']}")
    assert port["targetPort"] == container("Job")["ports"][0]["name"]
    assert service["spec"]["selector"].items() <= pods()["Job"]["metadata"]["labels"].items()
    assert workers["env"] == learner["env"]


@pytest.mark.parametrize("kind", POD_KINDS)
def test_pods_have_no_privileges(kind):
    spec, own = pods()[kind]["spec"], container(kind)["securityContext"]
    user = re.search(r"--uid (\d+)", (ROOT / "Dockerfile").read_text())
    assert spec["securityContext"]["runAsUser"] == int(user[1]) != 0
    assert spec["securityContext"]["runAsNonRoot"]
    assert not own["allowPrivilegeEscalation"]
    assert own["capabilities"]["drop"] == ["ALL"]
    assert spec["automountServiceAccountToken"] is False
    assert set(container(kind)["resources"]["requests"]) == {"cpu", "memory"}


@pytest.mark.parametrize("kind", POD_KINDS)
def test_secrets_are_referred_to_and_all_paths_are_mounted(kind):
    assert not find("Secret")
    [variable] = container(kind)["env"]
    assert variable["name"] == "TORCHBEAST_TOKEN"
    assert variable["valueFrom"]["secretKeyRef"]["name"] == "torchbeast-token"
    mounted = {mount["name"]: mount["mountPath"] for mount in container(kind)["volumeMounts"]}
    assert set(mounted) == {volume["name"] for volume in pods()[kind]["spec"]["volumes"]}
    paths = [value for name, value in flags_of(kind).items()
             if name.startswith("tls_") and isinstance(value, Path)]  # fmt: skip
    assert paths
    assert all(str(path.parent) == mounted["certificates"] for path in paths)


def test_the_page_says_how_to_make_every_secret_with_its_files():
    page = (ROOT / "docs/cluster.md").read_text()
    wanted = {kind: flags_of(kind) for kind in POD_KINDS}
    for kind, flags in wanted.items():
        [name] = [volume["secret"]["secretName"] for volume in pods()[kind]["spec"]["volumes"]
                  if "secret" in volume]  # fmt: skip
        [command] = re.findall(rf"kubectl create secret generic {name}(.*)", page)
        files = {value.name for name, value in flags.items()
                 if name.startswith("tls_") and isinstance(value, Path)}  # fmt: skip
        assert files == set(re.findall(r"--from-file=keys/(\S+)", command))
    assert "kubectl create secret generic torchbeast-token --from-file=keys/token" in page
    assert "kubectl apply -f deploy/kubernetes" in page
