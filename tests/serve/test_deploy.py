"""The deployment files: every field is one that Kubernetes and KServe know, and what they say of our server is true."""

from __future__ import annotations

import re

import pytest

from cnmm.cli import main as cli
from cnmm.cli.usage import check_ranges
from tests.helpers import ROOT

yaml = pytest.importorskip("yaml")
DEPLOY = ROOT / "deploy"

# A small schema: a type; [schema of all items]; {field: schema}, where `field!` must be there and others may not be;
# or {"*": schema}, for any names.
TEXTS = {"*": str}
META = {"name!": str, "labels": TEXTS, "annotations": TEXTS}
PROBE = {
    "httpGet!": {"path!": str, "port!": (str, int)},
    "periodSeconds": int,
    "timeoutSeconds": int,
    "failureThreshold": int,
    "successThreshold": int,
    "initialDelaySeconds": int,
}
SECURITY = {
    "runAsNonRoot": bool,
    "runAsUser": int,
    "seccompProfile": {"type!": str},
    "allowPrivilegeEscalation": bool,
    "readOnlyRootFilesystem": bool,
    "capabilities": {"drop": [str]},
}
CONTAINER = {
    "name!": str,
    "image!": str,
    "args": [str],
    "command": [str],
    "ports!": [{"name": str, "containerPort!": int, "protocol": str}],
    "startupProbe": PROBE,
    "readinessProbe!": PROBE,
    "livenessProbe!": PROBE,
    "lifecycle": {"preStop!": {"exec!": {"command!": [str]}}},
    "resources!": {"requests!": {"cpu!": str, "memory!": str}, "limits!": {"cpu!": str, "memory!": str}},
    "securityContext!": SECURITY,
    "volumeMounts": [{"name!": str, "mountPath!": str, "readOnly": bool}],
}
POD = {
    "terminationGracePeriodSeconds!": int,
    "securityContext": SECURITY,
    "containers!": [CONTAINER],
    "volumes": [
        {
            "name!": str,
            "persistentVolumeClaim": {"claimName!": str, "readOnly": bool},
            "emptyDir": {"medium": str, "sizeLimit": str},
        }
    ],
}
RULES = {
    "stabilizationWindowSeconds": int,
    "policies": [{"type!": str, "value!": int, "periodSeconds!": int}],
}
KINDS = {
    ("apps/v1", "Deployment"): {
        "selector!": {"matchLabels!": TEXTS},
        "replicas": int,
        "strategy": {"type": str, "rollingUpdate": {"maxUnavailable": (int, str), "maxSurge": (int, str)}},
        "template!": {"metadata!": {"labels!": TEXTS, "annotations": TEXTS}, "spec!": POD},
    },
    ("v1", "Service"): {
        "selector!": TEXTS,
        "ports!": [{"name": str, "port!": int, "targetPort!": (str, int), "protocol": str}],
    },
    ("autoscaling/v2", "HorizontalPodAutoscaler"): {
        "scaleTargetRef!": {"apiVersion!": str, "kind!": str, "name!": str},
        "minReplicas": int,
        "maxReplicas!": int,
        "metrics!": [
            {
                "type!": str,
                "pods!": {"metric!": {"name!": str}, "target!": {"type!": str, "averageValue!": str}},
            }
        ],
        "behavior": {"scaleUp": RULES, "scaleDown": RULES},
    },
    ("policy/v1", "PodDisruptionBudget"): {"maxUnavailable": (int, str), "selector!": {"matchLabels!": TEXTS}},
    ("serving.kserve.io/v1alpha1", "ClusterServingRuntime"): {
        "annotations": TEXTS,
        "supportedModelFormats!": [{"name!": str, "version": str, "autoSelect": bool, "priority": int}],
        "protocolVersions!": [str],
        "multiModel": bool,
        "containers!": [CONTAINER],
    },
    ("serving.kserve.io/v1beta1", "InferenceService"): {
        "predictor!": {
            "minReplicas": int,
            "maxReplicas": int,
            "model!": {
                "modelFormat!": {"name!": str},
                "protocolVersion": str,
                "runtime": str,
                "storageUri!": str,
            },
        },
    },
}


def check(value, schema, where):
    """Asserts that a value is as the schema says."""
    if isinstance(schema, list):
        assert isinstance(value, list), where
        assert value, where
        for number, item in enumerate(value):
            check(item, schema[0], f"{where}[{number}]")
    elif isinstance(schema, dict):
        assert isinstance(value, dict), where
        known = {name.rstrip("!"): inner for name, inner in schema.items()}
        for name, item in value.items():
            assert name in known or "*" in known, f"{where}.{name} is unknown"
            check(item, known.get(name, known.get("*")), f"{where}.{name}")
        for name in schema:
            assert not name.endswith("!") or name[:-1] in value, f"{where}.{name} is missing"
    else:
        assert isinstance(value, schema), f"{where} is {value!r}"
        assert not (isinstance(value, bool) and schema is not bool), f"{where} is {value!r}"


def documents(name):
    return list(yaml.safe_load_all((DEPLOY / name).read_text("utf-8")))


@pytest.fixture(scope="module")
def kubernetes():
    return {document["kind"]: document for document in documents("kubernetes.yaml")}


@pytest.fixture(scope="module")
def kserve():
    return {document["kind"]: document for document in documents("kserve.yaml")}


@pytest.fixture(scope="module")
def containers(kubernetes, kserve):
    pod = kubernetes["Deployment"]["spec"]["template"]["spec"]
    return [*pod["containers"], *kserve["ClusterServingRuntime"]["spec"]["containers"]]


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kserve.yaml"])
def test_every_field_is_known(name):
    for document in documents(name):
        where = document["kind"]
        spec = KINDS[document["apiVersion"], document["kind"]]
        check(document, {"apiVersion!": str, "kind!": str, "metadata!": META, "spec!": spec}, where)


def test_the_schema_finds_mistakes():
    for broken in ({"name": "a", "port": 1}, {"port!": 3}, {"port": True}, {"port": "1"}, {}):
        with pytest.raises(AssertionError):
            check(broken, {"port!": int}, "here")


def test_parts_fit_together(kubernetes):
    labels = kubernetes["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    for selector in (
        kubernetes["Deployment"]["spec"]["selector"]["matchLabels"],
        kubernetes["Service"]["spec"]["selector"],
        kubernetes["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector
        assert selector.items() <= labels
    pod = kubernetes["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert kubernetes["Service"]["spec"]["ports"][0]["targetPort"] in ports
    target = kubernetes["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", kubernetes["Deployment"]["metadata"]["name"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_kserve_finds_its_runtime(kserve):
    runtime, model = kserve["ClusterServingRuntime"], kserve["InferenceService"]["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in {each["name"] for each in runtime["spec"]["supportedModelFormats"]}
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    assert runtime["spec"]["containers"][0]["name"] == "kserve-container"  # the name that KServe looks for


def started_with(container):
    """The command line of a container, as our parser reads it."""
    import tyro

    verb = tyro.cli(cli.VERBS["serve"], args=container["args"], config=cli._TYRO)
    check_ranges(verb)
    return verb


def test_containers_start_as_they_say(containers, kubernetes):
    scaled = kubernetes["HorizontalPodAutoscaler"]["spec"]["metrics"][0]["pods"]["target"]["averageValue"]
    for container in containers:
        verb = started_with(container)
        assert verb.host == "0.0.0.0"
        assert verb.port in {port["containerPort"] for port in container["ports"]}
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert str(verb.cores) == container["resources"]["limits"]["cpu"] == scaled


def test_there_is_time_to_leave(kubernetes):
    """preStop, draining, and the longest that admitted requests may take."""
    from cnmm.serve.listen import LEAVE_S

    pod = kubernetes["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    word, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert word == "sleep"
    needed = float(seconds) + started_with(container).drain_s + LEAVE_S
    assert needed < pod["terminationGracePeriodSeconds"] < 2 * needed
    probe = container["readinessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] < started_with(container).drain_s


def test_what_they_ask_for_exists(containers, timed_ladder, kubernetes):
    from cnmm.serve.app import create_app

    app = create_app(timed_ladder)
    paths = {route.path for route in app.routes}
    exposed = app.state.engine.metrics.exposition().decode()
    for container in containers:
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container.get(name, container["readinessProbe"])["httpGet"]["path"] in paths
    scraped = kubernetes["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert scraped["prometheus.io/path"] in paths
    metric = kubernetes["HorizontalPodAutoscaler"]["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert re.search(rf"^{metric} ", exposed, re.M)
    (rule,) = documents("prometheus-adapter.yaml")[0]["rules"]["custom"]
    assert rule["name"]["as"] == metric
    assert re.fullmatch(rule["name"]["matches"], metric)
    assert rule["seriesQuery"].startswith(metric + "{")


def test_the_container(timed_ladder):
    """Its files are there, its user is not root, and what it runs is ours."""
    text = (DEPLOY / "Containerfile").read_text("utf-8").replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    copied = [rest.split()[:-1] for word, rest in lines if word == "COPY" and "--from" not in rest]
    sources = [source for each in copied for source in each]
    allowed = (ROOT / ".containerignore").read_text("utf-8")
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}\n" in allowed
    assert allowed == (ROOT / ".dockerignore").read_text("utf-8")
    words = dict(lines)
    assert words["USER"].isdigit()
    assert int(words["USER"]) > 0
    assert words["ENTRYPOINT"] == '["cnmm", "serve"]'
    verb = started_with({"args": yaml.safe_load(words["CMD"])})
    assert (verb.host, str(verb.port)) == ("0.0.0.0", words["EXPOSE"])
    assert f"http://127.0.0.1:{verb.port}/v2/health/ready" in words["HEALTHCHECK"]
    assert '"/src[serve]"' in text
