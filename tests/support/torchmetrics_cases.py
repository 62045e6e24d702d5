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
from torchmetrics_inputs import (
    CLASSES,
    SIZES,
    Features,
    Inputs,
    answers,
    class_scores,
    clusters,
    distributions,
    faces,
    floats,
    gapped,
    generated,
    graded,
    gray,
    groups,
    ignoring,
    images,
    index_maps,
    label_scores,
    labels,
    log_distributions,
    long_class_scores,
    long_label_scores,
    long_scores,
    numbers,
    one_hot_maps,
    one_number,
    panoptic,
    pansharpened,
    points,
    positives,
    queries,
    rated,
    ratings,
    scores,
    segments,
    sentences,
    signals,
    spectra,
    square,
    tasks,
    tokens,
    translations,
    wide,
    wide_floats,
)

Options = Mapping[str, Any]


class Case(NamedTuple):
    """One configuration of a metric.

        Args:
    name: The class and its arguments.
    metric: Name of the class.
            make: Makes the metric.
            inputs: Draws the arguments of `update`.
    """

    name: str
    metric: str
    make: Callable[[], Any]
    inputs: Inputs


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


# The table: names, inputs and options

RATES = "Accuracy HammingDistance NegativePredictiveValue Precision Recall Specificity StatScores F1Score FBetaScore"
CURVES = "PrecisionRecallCurve ROC"
AREAS = "AUROC AveragePrecision"
FIXED = {
    "PrecisionAtFixedRecall": "min_recall",
    "RecallAtFixedPrecision": "min_precision",
    "SensitivityAtSpecificity": "min_specificity",
    "SpecificityAtSensitivity": "min_sensitivity",
}
TASKS: dict[str, tuple[Options, Inputs, Inputs]] = {
    "Binary": ({}, scores, long_scores),
    "Multiclass": ({"num_classes": CLASSES}, class_scores, long_class_scores),
    "Multilabel": ({"num_labels": CLASSES}, label_scores, long_label_scores),
}

Row = tuple[str, Inputs, Sequence[Options]]


def _extra(name: str) -> Options:
    extra: dict[str, Options] = {"FBetaScore": {"beta": 2.0}}
    extra |= {fixed: {argument: 0.5} for fixed, argument in FIXED.items()}
    return extra.get(name, {})


def _classification() -> Iterator[Row]:
    """Return the classes of each task: `BinaryAccuracy` and so on."""
    for task, (fixed, flat, long) in TASKS.items():
        for name, given, choices in (*_rates(task), *_curves(task), *_tables(task)):
            for options in grid(ignore_index=(None, -1), **choices):
                inputs = long if name == "ExactMatch" or options.get("multidim_average") == "samplewise" else flat
                inputs = inputs if options["ignore_index"] is None else ignoring(inputs)
                yield task + name, inputs, [{**fixed, **given, **options}]


Choices = tuple[str, Options, dict[str, Sequence[Any]]]  # name without the task, fixed arguments, varying arguments


def _rates(task: str) -> Iterator[Choices]:
    dimensions: dict[str, Sequence[Any]] = {"multidim_average": ("global", "samplewise")}
    most = {"top_k": (1, 2)} if task == "Multiclass" else {}
    for name in RATES.split():
        yield name, _extra(name), {**dimensions, **_averages(task), **most}
    if task != "Binary":
        yield "ExactMatch", {}, dimensions


def _averages(task: str) -> dict[str, Sequence[Any]]:
    return {"average": ("micro", "macro", "weighted", None)} if task != "Binary" else {}


def _curves(task: str) -> Iterator[Choices]:
    thresholds: dict[str, Sequence[Any]] = {"thresholds": (None, 5)}
    for name in f"LogAUC EER {' '.join(FIXED)}".split():
        yield name, _extra(name), thresholds
    for name in CURVES.split():
        yield name, {}, {**thresholds, **({"average": (None, "macro")} if task == "Multiclass" else {})}
    for name in AREAS.split():
        averages = {"average": ("macro", "weighted", None)} if task != "Binary" else {}
        yield name, {}, {**thresholds, **averages}
    if task == "Multilabel":
        yield "AUROC", {"average": "micro"}, thresholds


def _tables(task: str) -> Iterator[Choices]:
    yield "ConfusionMatrix", {}, {"normalize": (None, "true", "pred", "all")}
    yield "JaccardIndex", {}, _averages(task)
    yield "MatthewsCorrCoef", {}, {}
    if task != "Multilabel":
        yield "CohenKappa", {}, {"weights": (None, "linear", "quadratic")}
        yield "CalibrationError", {}, {"norm": ("l1", "l2", "max"), "n_bins": (5, 15)}
        yield "HingeLoss", {}, {"squared": (False, True)}


def _by_task() -> Iterator[Row]:
    """Return the classes that choose one of those by their argument `task`."""
    names = f"{RATES} {CURVES} {AREAS} LogAUC EER {' '.join(FIXED)} ConfusionMatrix JaccardIndex MatthewsCorrCoef"
    for task, (fixed, flat, long) in TASKS.items():
        for name in names.split():
            yield name, flat, [{"task": task.lower(), **fixed, **_extra(name)}]
        if task != "Multilabel":
            yield "CohenKappa CalibrationError HingeLoss", flat, [{"task": task.lower(), **fixed}]
        if task != "Binary":
            choices = [{"task": task.lower(), **fixed, "multidim_average": kind} for kind in ("global", "samplewise")]
            yield "ExactMatch", long, choices


ERRORS = """ConcordanceCorrCoef LogCoshError MeanAbsoluteError MeanSquaredError PearsonCorrCoef RelativeSquaredError
    SpearmanCorrCoef KendallRankCorrCoef"""
RELATIVE = """MeanAbsolutePercentageError MeanSquaredLogError SymmetricMeanAbsolutePercentageError
    WeightedMeanAbsolutePercentageError"""
CLUSTERS = """AdjustedRandScore CompletenessScore FowlkesMallowsIndex HomogeneityScore MutualInfoScore RandScore
    VMeasureScore"""
SIMILARITIES = """ErrorRelativeGlobalDimensionlessSynthesis SpectralAngleMapper UniversalImageQualityIndex
    SpectralDistortionIndex StructuralSimilarityIndexMeasure"""
REDUCTIONS = ("elementwise_mean", "sum", "none")
RETRIEVAL = "MAP MRR NormalizedDCG Precision Recall HitRate FallOut AUROC"
ROWS: list[Row] = [
    *_classification(),
    *_by_task(),
    ("MulticlassHingeLoss", class_scores, grid(num_classes=[CLASSES], multiclass_mode=["one-vs-all"])),
    ("BinaryROC", scores, [{"thresholds": [0.2, 0.5, 0.8]}]),
    ("BinaryAUROC", scores, grid(max_fpr=[0.5], thresholds=[None, 5])),
    ("BinaryF1Score", scores, [{"zero_division": 1}]),
    ("BinaryFairness", groups, grid(num_groups=[2], task=["all", "demographic_parity", "equal_opportunity"])),
    ("BinaryGroupStatRates", groups, [{"num_groups": 2}]),
    (
        "MultilabelCoverageError MultilabelRankingAveragePrecision MultilabelRankingLoss",
        label_scores,
        grid(num_labels=[CLASSES]),
    ),
    # Regression
    (
        ERRORS,
        floats,
        [{}],
    ),
    (
        ERRORS,
        wide_floats,
        [{"num_outputs": 2}],
    ),
    ("MeanSquaredError RelativeSquaredError", floats, [{"squared": False}]),
    ("ContinuousRankedProbabilityScore", segments, [{}]),
    ("CosineSimilarity", wide_floats, grid(reduction=["sum", "mean", "none"])),
    ("CriticalSuccessIndex", positives, grid(threshold=[0.8, 1.0])),
    (
        "CriticalSuccessIndex",
        lambda draw: (draw.uniform(draw.n, 4), draw.uniform(draw.n, 4)),
        [{"threshold": 0.5, "keep_sequence_dim": 0}],
    ),
    ("ExplainedVariance", floats, [{}]),
    (
        "ExplainedVariance R2Score",
        wide_floats,
        grid(multioutput=["uniform_average", "raw_values", "variance_weighted"]),
    ),
    ("R2Score", floats, grid(adjusted=[0, 1])),
    ("JensenShannonDivergence KLDivergence", distributions, grid(reduction=["mean", "sum", "none"])),
    ("JensenShannonDivergence KLDivergence", log_distributions, [{"log_prob": True}]),
    ("KendallRankCorrCoef", floats, grid(variant=["a", "b", "c"], t_test=[True], alternative=["two-sided", "less"])),
    (
        RELATIVE,
        positives,
        [{}],
    ),
    ("MinkowskiDistance", floats, grid(p=[1, 2, 3.5])),
    ("NormalizedRootMeanSquaredError", positives, grid(normalization=["mean", "range", "std", "l2"])),
    (
        "NormalizedRootMeanSquaredError",
        lambda draw: (draw.uniform(draw.n, 2), draw.uniform(draw.n, 2)),
        grid(normalization=["mean", "range", "std", "l2"], num_outputs=[2]),
    ),
    ("TweedieDevianceScore", positives, grid(power=[0.0, 1.0, 1.5, 2.0, 3.0])),
    # Nominal
    ("CramersV TschuprowsT", labels, grid(num_classes=[CLASSES], bias_correction=[True, False])),
    ("PearsonsContingencyCoefficient TheilsU", labels, grid(num_classes=[CLASSES])),
    ("FleissKappa", ratings, [{"mode": "counts"}]),
    ("FleissKappa", rated, [{"mode": "probs"}]),
    # Audio
    ("ComplexScaleInvariantSignalNoiseRatio", spectra, grid(zero_mean=[False, True])),
    ("ScaleInvariantSignalDistortionRatio SignalNoiseRatio", signals, grid(zero_mean=[False, True])),
    ("ScaleInvariantSignalNoiseRatio", signals, [{}]),
    ("SignalDistortionRatio", signals, grid(filter_length=[8], zero_mean=[False, True])),
    ("SourceAggregatedSignalDistortionRatio", signals, grid(scale_invariant=[False, True])),
    (
        "PermutationInvariantTraining",
        signals,
        [{"metric_func": torchmetrics.functional.scale_invariant_signal_noise_ratio}],
    ),
    # Clustering
    (
        "AdjustedMutualInfoScore NormalizedMutualInfoScore",
        labels,
        grid(average_method=["arithmetic", "geometric", "min", "max"]),
    ),
    (
        CLUSTERS,
        labels,
        [{}],
    ),
    ("CalinskiHarabaszScore DaviesBouldinScore DunnIndex", clusters, [{}]),
    # Detection
    (
        "PanopticQuality",
        panoptic,
        grid(things=[{0}], stuffs=[{1}], return_sq_and_rq=[False, True], return_per_class=[False, True]),
    ),
    ("ModifiedPanopticQuality", panoptic, [{"things": {0}, "stuffs": {1}}]),
    # Images
    (
        SIMILARITIES,
        images,
        grid(reduction=REDUCTIONS),
    ),
    (
        "StructuralSimilarityIndexMeasure",
        images,
        [
            {"data_range": 1.0},
            {"gaussian_kernel": False},
            {"return_contrast_sensitivity": True},
            {"return_full_image": True},
        ],
    ),
    (
        "MultiScaleStructuralSimilarityIndexMeasure",
        images,
        grid(reduction=REDUCTIONS, data_range=[1.0], betas=[(0.4, 0.6)], kernel_size=[3]),
    ),
    ("PeakSignalNoiseRatio", images, grid(data_range=[1.0, (0.0, 1.0)], reduction=["elementwise_mean"])),
    ("PeakSignalNoiseRatio", images, grid(data_range=[1.0], reduction=REDUCTIONS, dim=[(1, 2, 3)])),
    ("PeakSignalNoiseRatioWithBlockedEffect", gray, [{"data_range": 1.0}]),
    ("QualityWithNoReference SpatialDistortionIndex", pansharpened, grid(reduction=REDUCTIONS)),
    ("RelativeAverageSpectralError RootMeanSquaredErrorUsingSlidingWindow", images, [{}, {"window_size": 4}]),
    ("SpatialCorrelationCoefficient", images, [{}]),
    ("TotalVariation", lambda draw: images(draw)[:1], grid(reduction=["sum", "mean", "none"])),
    ("VisualInformationFidelity", square, [{}, {"reduction": "none"}]),
    ("FrechetInceptionDistance", generated, [{"feature": Features()}]),
    ("KernelInceptionDistance", generated, [{"feature": Features(), "subset_size": 3, "subsets": 4}]),
    ("MemorizationInformedFrechetInceptionDistance", generated, [{"feature": Features()}]),
    ("InceptionScore", lambda draw: generated(draw)[:1], [{"feature": Features(), "splits": 2}]),
    # Multimodal
    ("LipVertexError", faces, [{"mouth_map": [0, 2, 5]}]),
    # Retrieval
    (
        " ".join(f"Retrieval{name}" for name in RETRIEVAL.split()),
        queries,
        [*grid(top_k=[None, 2], aggregation=["mean", "median", "max"]), {"empty_target_action": "skip"}],
    ),
    ("RetrievalRPrecision", queries, grid(aggregation=["mean", "min"])),
    (
        "RetrievalPrecisionRecallCurve RetrievalRecallAtFixedPrecision",
        queries,
        grid(max_k=[None, 2], adaptive_k=[False, True]),
    ),
    # Segmentation
    (
        "DiceScore",
        one_hot_maps,
        grid(
            num_classes=[CLASSES],
            average=["micro", "macro", "weighted", "none"],
            aggregation_level=["samplewise", "global"],
        ),
    ),
    (
        "GeneralizedDiceScore",
        one_hot_maps,
        grid(num_classes=[CLASSES], per_class=[False, True], weight_type=["square", "simple", "linear"]),
    ),
    ("MeanIoU", one_hot_maps, grid(num_classes=[CLASSES], per_class=[False, True], include_background=[False, True])),
    ("MeanIoU", one_hot_maps, [{}]),
    ("DiceScore GeneralizedDiceScore MeanIoU", index_maps, [{"num_classes": CLASSES, "input_format": "index"}]),
    ("HausdorffDistance", one_hot_maps, grid(num_classes=[CLASSES], directed=[False, True])),
    # Shape
    ("ProcrustesDisparity", points, grid(reduction=["mean", "sum"])),
    # Text
    ("BLEUScore", translations, grid(n_gram=[2, 4], smooth=[False, True])),
    ("SacreBLEUScore", translations, grid(tokenize=["13a", "char", "none"], lowercase=[False, True])),
    ("CHRFScore", translations, grid(n_char_order=[2], n_word_order=[0, 2], return_sentence_level_score=[False, True])),
    ("CharErrorRate MatchErrorRate WordErrorRate WordInfoLost WordInfoPreserved", sentences, [{}]),
    ("EditDistance", sentences, grid(reduction=["mean", "sum", "none"])),
    ("ExtendedEditDistance", translations, grid(return_sentence_level_score=[False, True])),
    ("TranslationEditRate", translations, grid(return_sentence_level_score=[False, True])),
    ("Perplexity", tokens, grid(ignore_index=[None, 0])),
    ("ROUGEScore", translations, grid(accumulate=["best", "avg"], rouge_keys=[("rouge1", "rouge2", "rougeL")])),
    ("SQuAD", answers, [{}]),
    # Aggregation
    ("CatMetric MaxMetric MeanMetric MinMetric SumMetric", numbers, [{}]),
    ("CatMetric MaxMetric MeanMetric MinMetric SumMetric", gapped, grid(nan_strategy=["ignore", 0.0])),
    ("CatMetric MaxMetric MeanMetric MinMetric SumMetric", one_number, [{}]),
    ("MeanMetric", lambda draw: (draw.normal(draw.n), draw.uniform(draw.n)), [{}]),
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


PAIRS: dict[str, Inputs] = {"MeanMetric": numbers, "BinaryAUROC": scores, "PearsonCorrCoef": floats}
WIDE: dict[str, Inputs] = {
    "MeanSquaredError": wide_floats,
    "PearsonCorrCoef": wide_floats,
    "ExplainedVariance": wide_floats,
    "BinaryAUROC": wide,
}
Wrapped = tuple[str, str, Callable[[], Any], Inputs]


def _wrapped() -> Iterator[Wrapped]:
    """Return wrappers of other metrics: class, a label of the configuration, and the fields of `Case`."""
    accuracy: dict[str, Any] = {"name": "MulticlassAccuracy", "num_classes": CLASSES}
    yield (
        "BinaryTargetTransformer",
        "accuracy",
        lambda: _metric("BinaryTargetTransformer", wrapped_metric=_metric("BinaryAccuracy"), threshold=1),
        graded,
    )
    yield (
        "LambdaInputTransformer",
        "AUROC",
        lambda: _metric("LambdaInputTransformer", wrapped_metric=_metric("BinaryAUROC"), transform_pred=torch.sqrt),
        scores,
    )
    for strategy, name in product(("poisson", "multinomial"), PAIRS):
        yield "BootStrapper", f"{strategy}, {name}", partial(_boots, strategy, name), PAIRS[name]
    yield "ClasswiseWrapper", "accuracy", _by_label, class_scores
    yield "CompositionalMetric", "-", lambda: _metric("BinaryAccuracy") - 2 * _metric("BinaryF1Score"), scores
    yield "CompositionalMetric", "abs", lambda: abs(_metric("PearsonCorrCoef")), floats
    yield "CompositionalMetric", "/", lambda: _metric("BinaryAUROC") / _metric("BinaryAUROC", thresholds=5), scores
    yield "FeatureShare", "two", _shared, generated
    yield "MetricCollection", "groups", _kinds, class_scores
    yield "MetricCollection", "no groups", _errors, floats
    yield "MetricCollection", "wrappers", _nested, class_scores
    yield "MetricTracker", "metric", lambda: _tracked(_metric(**accuracy)), class_scores
    yield "MetricTracker", "collection", lambda: _tracked(_errors()), floats
    for name, inputs in {**PAIRS, "BinaryAccuracy": scores}.items():
        yield "MinMaxMetric", name, partial(_extremes, name), inputs
    for name, inputs in WIDE.items():
        yield "MultioutputWrapper", name, partial(_outputs, name), inputs
    yield "MultitaskWrapper", "two tasks", _both_tasks, tasks
    # Windows as large as all data. `Running` refuses metrics with `full_state_update`, and loses list states.
    for name, inputs in {"MeanMetric": numbers, "SumMetric": numbers, "MeanSquaredError": floats}.items():
        yield "Running", name, partial(_window, name), inputs
    yield "Running", "MulticlassAccuracy", lambda: _window(**accuracy), class_scores
    yield "RunningMean", "4", lambda: _metric("RunningMean", window=4), numbers
    yield "RunningSum", "4", lambda: _metric("RunningSum", window=4), numbers


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
                yield Case(_label(name, inputs, options), name, partial(_metric, name, **options), inputs)
    for name, label, make, inputs in _wrapped():
        if name in public_classes():
            yield Case(f"{name}: {label}", name, make, inputs)


def _label(name: str, inputs: Inputs, options: Options) -> str:
    shown = [f"{key}={value}" for key, value in options.items() if not isinstance(value, torch.nn.Module)]
    return f"{name}({', '.join(shown)}) of {inputs.__name__}"


@lru_cache(maxsize=1)
def cases() -> list[Case]:
    """Return all configurations, except those that the installed torchmetrics lacks."""
    return list(_cases())
