"""Configurations of all metrics of torchmetrics that need neither a download nor another package.

`cases()` returns them. `LEFT_OUT` has the other classes, with reasons. Together they cover every public class.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torchmetrics
from torchmetrics import Metric, MetricCollection
from torchmetrics_inputs import CLASSES, INPUTS, SIZES, Features, Inputs

Options = Mapping[str, Any]


class Case(NamedTuple):
    name: str  # the class and its arguments
    metric: str  # the class
    make: Callable[[], Any]
    inputs: Inputs  # draws the arguments of `update`


def grid(**options: Sequence[Any]) -> list[Options]:
    """Return all combinations of values of options."""
    return [dict(zip(options, values, strict=True)) for values in product(*options.values())]


@lru_cache(maxsize=1)
def public_classes() -> dict[str, type[Any]]:
    """Return the public metrics and wrappers of the installed torchmetrics, by name."""
    found: dict[str, type[Any]] = {}
    for module in _modules():
        for name, value in vars(module).items():
            if not inspect.isclass(value) or name.startswith("_") or value.__name__ != name:
                continue
            is_known = issubclass(value, (Metric, MetricCollection, torchmetrics.MetricTracker))
            if is_known and value.__module__.startswith("torchmetrics."):
                found[name] = value
    return found


def _modules() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in pkgutil.walk_packages(torchmetrics.__path__, "torchmetrics."):
            yield importlib.import_module(info.name)


# The table: names, inputs and options. Options that change no state differ only in what torchmetrics computes.

FIXED = {
    "PrecisionAtFixedRecall": "min_recall",
    "RecallAtFixedPrecision": "min_precision",
    "SensitivityAtSpecificity": "min_specificity",
    "SpecificityAtSensitivity": "min_sensitivity",
}
RATES = "Accuracy HammingDistance NegativePredictiveValue Precision Recall Specificity StatScores F1Score FBetaScore"
CURVES = f"PrecisionRecallCurve ROC AUROC AveragePrecision LogAUC EER {' '.join(FIXED)}"
COUNTS = "ConfusionMatrix JaccardIndex MatthewsCorrCoef"
CERTAINTIES = "CohenKappa CalibrationError HingeLoss"
TASKS: dict[str, tuple[Options, str, str]] = {
    "Binary": ({}, "scores", "long_scores"),
    "Multiclass": ({"num_classes": CLASSES}, "class_scores", "long_class_scores"),
    "Multilabel": ({"num_labels": CLASSES}, "label_scores", "long_label_scores"),
}

Row = tuple[str, str, Sequence[Options]]


def _classification() -> Iterator[Row]:
    """Return the classes of each task: `BinaryAccuracy` and so on, and those that choose one of them by `task`."""
    for task, (fixed, flat, long) in TASKS.items():
        counts = COUNTS if task == "Multilabel" else f"{COUNTS} {CERTAINTIES}"
        exact = "" if task == "Binary" else "ExactMatch"
        averages: dict[str, Sequence[Any]] = {"average": ("micro", "macro")} if task != "Binary" else {}
        for names, inputs, choices in (
            (RATES, flat, grid(**averages)),
            (f"{RATES} {exact}", long, [{"multidim_average": "samplewise"}]),
            (exact, long, [{}]),
            (CURVES, flat, grid(thresholds=(None, 5))),
            (counts, flat, [{}]),
        ):
            for name in names.split():
                made = [{**fixed, **_extra(name), **options} for options in choices]
                yield task + name, inputs, made
                yield name, inputs, [{"task": task.lower(), **made[0]}]


def _extra(name: str) -> Options:
    if name == "FBetaScore":
        return {"beta": 2.0}
    return {FIXED[name]: 0.5} if name in FIXED else {}


ERRORS = """ConcordanceCorrCoef LogCoshError MeanAbsoluteError MeanSquaredError PearsonCorrCoef RelativeSquaredError
    SpearmanCorrCoef KendallRankCorrCoef"""
RELATIVE = """MeanAbsolutePercentageError MeanSquaredLogError SymmetricMeanAbsolutePercentageError TweedieDevianceScore
    WeightedMeanAbsolutePercentageError"""
NOMINAL = """CramersV TschuprowsT PearsonsContingencyCoefficient TheilsU"""
CLUSTERS = """AdjustedMutualInfoScore NormalizedMutualInfoScore AdjustedRandScore CompletenessScore FowlkesMallowsIndex
    HomogeneityScore MutualInfoScore RandScore VMeasureScore"""
NOISES = """ScaleInvariantSignalDistortionRatio SignalNoiseRatio ScaleInvariantSignalNoiseRatio
    SourceAggregatedSignalDistortionRatio"""
SIMILARITIES = """ErrorRelativeGlobalDimensionlessSynthesis SpectralAngleMapper UniversalImageQualityIndex
    SpectralDistortionIndex StructuralSimilarityIndexMeasure"""
RETRIEVAL = "MAP MRR NormalizedDCG Precision Recall HitRate FallOut AUROC RPrecision PrecisionRecallCurve"
WORDS = "CharErrorRate MatchErrorRate WordErrorRate WordInfoLost WordInfoPreserved"
AGGREGATORS = "CatMetric MaxMetric MeanMetric MinMetric SumMetric"
REDUCTIONS = ("elementwise_mean", "none")
IN_CLASSES = {"num_classes": CLASSES}
ROWS: list[Row] = [
    *_classification(),
    ("MulticlassHingeLoss", "class_scores", [{**IN_CLASSES, "multiclass_mode": "one-vs-all"}]),
    ("BinaryROC", "scores", [{"thresholds": [0.2, 0.5, 0.8]}]),
    ("BinaryFairness BinaryGroupStatRates", "groups", [{"num_groups": 2}]),
    (
        "MultilabelCoverageError MultilabelRankingAveragePrecision MultilabelRankingLoss",
        "label_scores",
        [{"num_labels": CLASSES}],
    ),
    # Regression
    (ERRORS, "floats", [{}]),
    (ERRORS, "wide_floats", [{"num_outputs": 2}]),
    ("ContinuousRankedProbabilityScore", "segments", [{}]),
    ("CosineSimilarity", "wide_floats", [{}]),
    ("CriticalSuccessIndex", "positives", [{"threshold": 0.8}]),
    ("CriticalSuccessIndex", "ratios", [{"threshold": 0.5, "keep_sequence_dim": 0}]),
    ("ExplainedVariance R2Score", "wide_floats", grid(multioutput=["uniform_average", "raw_values"])),
    ("JensenShannonDivergence KLDivergence", "distributions", grid(reduction=["mean", "none"])),
    (RELATIVE, "positives", [{}]),
    ("MinkowskiDistance", "floats", [{"p": 3.5}]),
    ("NormalizedRootMeanSquaredError", "positives", grid(normalization=["mean", "range", "std", "l2"])),
    ("NormalizedRootMeanSquaredError", "wide_positives", [{"num_outputs": 2}]),
    # Nominal
    (NOMINAL, "labels", [IN_CLASSES]),
    ("FleissKappa", "ratings", [{"mode": "counts"}]),
    ("FleissKappa", "rated", [{"mode": "probs"}]),
    # Audio
    ("ComplexScaleInvariantSignalNoiseRatio", "spectra", [{}]),
    (NOISES, "signals", [{}]),
    ("SignalDistortionRatio", "signals", [{"filter_length": 8}]),
    (
        "PermutationInvariantTraining",
        "signals",
        [{"metric_func": torchmetrics.functional.scale_invariant_signal_noise_ratio}],
    ),
    # Clustering
    (CLUSTERS, "labels", [{}]),
    ("CalinskiHarabaszScore DaviesBouldinScore DunnIndex", "clusters", [{}]),
    # Detection
    ("PanopticQuality ModifiedPanopticQuality", "panoptic", [{"things": {0}, "stuffs": {1}}]),
    # Images
    (SIMILARITIES, "images", grid(reduction=REDUCTIONS)),
    ("StructuralSimilarityIndexMeasure", "images", grid(data_range=[1.0], return_full_image=[True])),
    (
        "MultiScaleStructuralSimilarityIndexMeasure",
        "images",
        grid(reduction=REDUCTIONS, data_range=[1.0], betas=[(0.4, 0.6)], kernel_size=[3]),
    ),
    ("PeakSignalNoiseRatio", "images", [{"data_range": 1.0}, {"data_range": 1.0, "dim": (1, 2, 3)}]),
    ("PeakSignalNoiseRatioWithBlockedEffect", "gray", [{"data_range": 1.0}]),
    ("QualityWithNoReference SpatialDistortionIndex", "pansharpened", [{}]),
    ("RelativeAverageSpectralError RootMeanSquaredErrorUsingSlidingWindow", "images", [{}]),
    ("SpatialCorrelationCoefficient", "images", [{}]),
    ("TotalVariation", "plain_images", [{}, {"reduction": "none"}]),
    ("VisualInformationFidelity", "square", [{}]),
    ("FrechetInceptionDistance MemorizationInformedFrechetInceptionDistance", "generated", [{"feature": Features()}]),
    ("KernelInceptionDistance", "generated", [{"feature": Features(), "subset_size": 3, "subsets": 4}]),
    ("InceptionScore", "plain_generated", [{"feature": Features(), "splits": 2}]),
    # Multimodal
    ("LipVertexError", "faces", [{"mouth_map": [0, 2, 5]}]),
    # Retrieval
    (" ".join(f"Retrieval{name}" for name in f"{RETRIEVAL} RecallAtFixedPrecision".split()), "queries", [{}]),
    # Segmentation
    ("DiceScore", "one_hot_maps", grid(num_classes=[CLASSES], aggregation_level=["samplewise", "global"])),
    ("GeneralizedDiceScore", "one_hot_maps", grid(num_classes=[CLASSES], per_class=[False, True])),
    ("MeanIoU", "one_hot_maps", grid(num_classes=[CLASSES], per_class=[False, True], include_background=[False, True])),
    ("MeanIoU", "one_hot_maps", [{}]),
    ("DiceScore GeneralizedDiceScore MeanIoU", "index_maps", [{**IN_CLASSES, "input_format": "index"}]),
    ("HausdorffDistance", "one_hot_maps", [IN_CLASSES]),
    # Shape
    ("ProcrustesDisparity", "points", [{}]),
    # Text
    ("BLEUScore", "translations", grid(n_gram=[2, 4])),
    ("SacreBLEUScore", "translations", [{}]),
    (
        "CHRFScore",
        "translations",
        grid(n_char_order=[2], n_word_order=[0, 2], return_sentence_level_score=[False, True]),
    ),
    (WORDS, "sentences", [{}]),
    ("EditDistance", "sentences", grid(reduction=["mean", "none"])),
    ("ExtendedEditDistance TranslationEditRate", "translations", grid(return_sentence_level_score=[False, True])),
    ("Perplexity", "tokens", [{}]),
    ("ROUGEScore", "translations", [{"rouge_keys": ("rouge1", "rouge2", "rougeL")}]),
    ("SQuAD", "answers", [{}]),
    # Aggregation
    (AGGREGATORS, "numbers", [{}]),
    (AGGREGATORS, "gapped", grid(nan_strategy=["ignore", 0.0])),
    (AGGREGATORS, "one_number", [{}]),
    ("MeanMetric", "weighted", [{}]),
]


def _metric(name: str, **options: Any) -> Any:
    return public_classes()[name](**options)


def _kinds() -> Any:
    """Return collections of several classes, including those of one compute group."""
    fixed: dict[str, Any] = {"num_classes": CLASSES}
    return MetricCollection(
        {
            "accuracy": _metric("MulticlassAccuracy", **fixed),
            "f1": _metric("MulticlassF1Score", average=None, **fixed),
            "precision": _metric("MulticlassPrecision", **fixed),
            "auroc": _metric("MulticlassAUROC", **fixed),
            "roc": _metric("MulticlassROC", thresholds=5, **fixed),
        },
        prefix="val_",
    )


def _tracked(metric: Any) -> Any:
    tracker = torchmetrics.MetricTracker(metric)
    tracker.increment()
    return tracker


def _by_label() -> Any:
    return _metric("ClasswiseWrapper", metric=_metric("MulticlassAccuracy", num_classes=CLASSES, average=None))


def _boots(strategy: str, name: str) -> Any:
    options = {"num_bootstraps": 4, "raw": True, "sampling_strategy": strategy}
    return _metric("BootStrapper", base_metric=_metric(name), **options)


def _extremes(name: str, **options: Any) -> Any:
    return _metric("MinMaxMetric", base_metric=_metric(name, **options))


def _outputs(name: str) -> Any:
    return _metric("MultioutputWrapper", base_metric=_metric(name), num_outputs=2)


def _window(name: str, **options: Any) -> Any:
    return _metric("Running", base_metric=_metric(name, **options), window=len(SIZES))


def _shared() -> Any:
    names = {"FrechetInceptionDistance": {}, "KernelInceptionDistance": {"subset_size": 3, "subsets": 4}}
    return _metric("FeatureShare", metrics=[_metric(name, feature=Features(), **o) for name, o in names.items()])


def _both_tasks() -> Any:
    values = MetricCollection([_metric("MeanSquaredError"), _metric("PearsonCorrCoef")])
    return _metric("MultitaskWrapper", task_metrics={"kind": _metric("BinaryAccuracy"), "value": values})


def _nested() -> Any:
    fixed: dict[str, Any] = {"num_classes": CLASSES}
    return MetricCollection(
        {
            "each": _by_label(),
            "all": _metric("MulticlassAccuracy", **fixed),
            "extremes": _extremes("MulticlassAccuracy", **fixed),
        }
    )


def _errors() -> Any:
    return MetricCollection([_metric("MeanSquaredError"), _metric("MeanAbsoluteError")], compute_groups=False)


PAIRS: dict[str, str] = {"MeanMetric": "numbers", "BinaryAUROC": "scores", "PearsonCorrCoef": "floats"}
WIDE: dict[str, str] = {
    "MeanSquaredError": "wide_floats",
    "PearsonCorrCoef": "wide_floats",
    "ExplainedVariance": "wide_floats",
    "BinaryAUROC": "wide",
}
Wrapped = tuple[str, str, Callable[[], Any], str]


def _wrapped() -> Iterator[Wrapped]:
    """Return wrappers of other metrics: class, a label of the configuration, and the fields of `Case`."""
    accuracy: dict[str, Any] = {"name": "MulticlassAccuracy", "num_classes": CLASSES}
    yield (
        "BinaryTargetTransformer",
        "accuracy",
        lambda: _metric("BinaryTargetTransformer", wrapped_metric=_metric("BinaryAccuracy"), threshold=1),
        "graded",
    )
    yield (
        "LambdaInputTransformer",
        "AUROC",
        lambda: _metric("LambdaInputTransformer", wrapped_metric=_metric("BinaryAUROC"), transform_pred=torch.sqrt),
        "scores",
    )
    for strategy, name in product(("poisson", "multinomial"), PAIRS):
        yield "BootStrapper", f"{strategy}, {name}", partial(_boots, strategy, name), PAIRS[name]
    yield "ClasswiseWrapper", "accuracy", _by_label, "class_scores"
    yield "CompositionalMetric", "-", lambda: _metric("BinaryAccuracy") - 2 * _metric("BinaryF1Score"), "scores"
    yield "CompositionalMetric", "abs", lambda: abs(_metric("PearsonCorrCoef")), "floats"
    yield "CompositionalMetric", "/", lambda: _metric("BinaryAUROC") / _metric("BinaryAUROC", thresholds=5), "scores"
    yield "FeatureShare", "two", _shared, "generated"
    yield "MetricCollection", "groups", _kinds, "class_scores"
    yield "MetricCollection", "no groups", _errors, "floats"
    yield "MetricCollection", "wrappers", _nested, "class_scores"
    yield "MetricTracker", "metric", lambda: _tracked(_metric(**accuracy)), "class_scores"
    yield "MetricTracker", "collection", lambda: _tracked(_errors()), "floats"
    for name, inputs in {**PAIRS, "BinaryAccuracy": "scores"}.items():
        yield "MinMaxMetric", name, partial(_extremes, name), inputs
    for name, inputs in WIDE.items():
        yield "MultioutputWrapper", name, partial(_outputs, name), inputs
    yield "MultitaskWrapper", "two tasks", _both_tasks, "tasks"
    # Windows as large as all data. `Running` refuses metrics with `full_state_update`, and loses list states.
    for name, inputs in {"MeanMetric": "numbers", "SumMetric": "numbers", "MeanSquaredError": "floats"}.items():
        yield "Running", name, partial(_window, name), inputs
    yield "Running", "MulticlassAccuracy", lambda: _window(**accuracy), "class_scores"
    yield "RunningMean", "4", lambda: _metric("RunningMean", window=4), "numbers"
    yield "RunningSum", "4", lambda: _metric("RunningSum", window=4), "numbers"


LEFT_OUT = {
    "it is a base class": "BaseAggregator Metric MetricInputTransformer RetrievalMetric WrapperMetric",
    "it needs torchvision": """CompleteIntersectionOverUnion DistanceIntersectionOverUnion
        GeneralizedIntersectionOverUnion IntersectionOverUnion PerceptualPathLength""",
    "it needs torchvision and a download": """ARNIQA DeepImageStructureAndTextureSimilarity
        LearnedPerceptualImagePatchSimilarity""",
    "it needs transformers and a download": "BERTScore CLIPImageQualityAssessment CLIPScore InfoLM",
    "it needs librosa, onnxruntime and a download": """DeepNoiseSuppressionMeanOpinionScore
        NonIntrusiveSpeechQualityAssessment""",
    "it needs pycocotools": "MeanAveragePrecision",
    "it needs pesq": "PerceptualEvaluationSpeechQuality",
    "it needs pystoi": "ShortTimeObjectiveIntelligibility",
    "it needs gammatone": "SpeechReverberationModulationEnergyRatio",
    "it needs torch_linear_assignment": "ClusterAccuracy",
    "it needs vmaf_torch": "VideoMultiMethodAssessmentFusion",
}


def all_names() -> list[str]:
    """Return the classes of all configurations, including those that the installed torchmetrics lacks."""
    rows = [name for names, _, _ in ROWS for name in names.split()]
    return list(dict.fromkeys([*rows, *(name for name, *_ in _wrapped())]))


def configurations() -> int:
    """Return the number of configurations, including those that the installed torchmetrics lacks."""
    return sum(len(names.split()) * len(choices) for names, _, choices in ROWS) + len(list(_wrapped()))


def _knows(name: str, options: Options) -> bool:
    if name not in public_classes():
        return False
    made = public_classes()[name]
    return options.keys() <= {*inspect.signature(made.__new__).parameters, *inspect.signature(made.__init__).parameters}


def _cases() -> Iterator[Case]:
    for names, inputs, choices in ROWS:
        for name in names.split():
            for options in filter(partial(_knows, name), choices):
                yield Case(_label(name, inputs, options), name, partial(_metric, name, **options), INPUTS[inputs])
    for name, label, make, inputs in _wrapped():
        if name in public_classes():
            yield Case(f"{name}: {label}", name, make, INPUTS[inputs])


def _label(name: str, inputs: str, options: Options) -> str:
    shown = [f"{key}={value}" for key, value in options.items() if not isinstance(value, torch.nn.Module)]
    return f"{name}({', '.join(shown)}) of {inputs}"


@lru_cache(maxsize=1)
def cases() -> list[Case]:
    """Return all configurations, except those that the installed torchmetrics lacks."""
    return list(_cases())
