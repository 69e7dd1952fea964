"""Params of the estimator and its model, made of elephant.options; see tests/support/param_types.py."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import keras
from pyspark.ml.param import Param, Params
from typing_extensions import Self

from elephant.config import Timeouts
from elephant.monitor.listeners import FitListener
from elephant.spark.model import KerasModel


class Options(TypedDict, total=False):
    """Params that a fit takes by name."""

    featuresCol: str | Sequence[str | Sequence[str]] | Mapping[str, str | Sequence[str]] | None
    predictionCol: str | None
    probabilityCol: str | None
    rawPredictionCol: str | None
    preprocessing: Callable[..., Any] | None
    inferenceBatchSize: int | None
    inferenceUseGpu: bool | None
    labelCol: str | Sequence[str | Sequence[str]] | Mapping[str, str | Sequence[str]] | None
    weightCol: str | Mapping[str, str] | None
    validationIndicatorCol: str | None
    classWeight: Mapping[int, float] | Literal['balanced'] | None
    callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None
    driverCallbacks: Sequence[keras.callbacks.Callback | FitListener] | keras.callbacks.Callback | FitListener | None
    eventsPath: str | os.PathLike[str] | None
    augmentation: Callable[..., Any] | None
    mode: Literal['synchronous', 'sync', 'asynchronous', 'async', 'hogwild', 'gossip'] | None
    aggregation: Literal['allreduce', 'server'] | None
    numWorkers: int | tuple[int, int] | None
    epochs: int | None
    batchSize: int | None
    validationFraction: float | None
    shuffle: bool | None
    seed: int | None
    learningRate: float | None
    scaleLearningRate: bool | None
    frequency: Literal['batch', 'epoch'] | int | None
    compression: Literal['bfloat16', 'float16', 'int8', 'topk', 'powersgd'] | str | None
    syncBatchNorm: bool | None
    shardOptimizer: bool | None
    allowBatchCoupledLoss: bool | None
    cache: Literal['disk', 'memory'] | None
    stepsPerEpoch: int | None
    bucketByLength: bool | None
    useGpu: bool | Literal['auto'] | None
    gpusPerWorker: int | None
    gpuTransport: Literal['auto', 'host', 'nccl'] | None
    distribution: keras.distribution.ModelParallel | keras.distribution.LayoutMap | None
    pipelineStages: int | Sequence[str] | None
    microBatches: int | None
    mixedPrecision: bool | None
    checkpointPath: str | os.PathLike[str] | None
    checkpointEpochs: int | None
    checkpointSeconds: float | None
    keepBest: str | None
    resume: bool | None
    maxRestarts: int | None
    timeouts: Timeouts | Mapping[str, float] | None
    encryption: bool | None
    ports: tuple[int, int] | str | None
    verbose: int | Literal['auto'] | None
    algorithm: Literal['downpour', 'adag', 'dynsgd', 'aeasgd', 'eamsgd', 'sum', 'adpsgd', 'sgp'] | str | None
    maxStaleness: int | None
    backgroundExchange: bool | None
    parameterServers: int | None
    serverPlacement: Literal['driver', 'executors'] | None
    port: int | None
    snapshotSeconds: float | None


class Arguments(Options, total=False):
    """Arguments of the constructor."""

    model: keras.Model | Callable[[], keras.Model] | str | os.PathLike[str] | KerasModel | None
    customObjects: Mapping[str, Any] | None


class ModelParamTypes(Params):
    """Those of the estimator and its model."""

    featuresCol: Param[Any]
    def getFeaturesCol(self) -> str | Sequence[str | Sequence[str]] | Mapping[str, str | Sequence[str]]:
        """Returns featuresCol: features: one column (array of numbers, ml vector, number), or numeric columns that
        make one vector; for several inputs, columns by the name of the input, or a list in their order."""
    def setFeaturesCol(self, value: str | Sequence[str | Sequence[str]] | Mapping[str, str | Sequence[str]] | None) -> Self:
        """Sets featuresCol: features: one column (array of numbers, ml vector, number), or numeric columns that
        make one vector; for several inputs, columns by the name of the input, or a list in their order. Returns the
        instance."""
    predictionCol: Param[Any]
    def getPredictionCol(self) -> str:
        """Returns predictionCol: column to add: the class (cross-entropy losses) or the value (one output unit) as
        double, else an array."""
    def setPredictionCol(self, value: str | None) -> Self:
        """Sets predictionCol: column to add: the class (cross-entropy losses) or the value (one output unit) as
        double, else an array. Returns the instance."""
    probabilityCol: Param[Any]
    def getProbabilityCol(self) -> str:
        """Returns probabilityCol: column to add for classifiers: the classes' probabilities as an ml vector."""
    def setProbabilityCol(self, value: str | None) -> Self:
        """Sets probabilityCol: column to add for classifiers: the classes' probabilities as an ml vector. Returns
        the instance."""
    rawPredictionCol: Param[Any]
    def getRawPredictionCol(self) -> str:
        """Returns rawPredictionCol: column to add for classifiers: the scores of the classes as an ml vector, which
        are logits where the loss takes logits, and else probabilities."""
    def setRawPredictionCol(self, value: str | None) -> Self:
        """Sets rawPredictionCol: column to add for classifiers: the scores of the classes as an ml vector, which
        are logits where the loss takes logits, and else probabilities. Returns the instance."""
    preprocessing: Param[Any]
    def getPreprocessing(self) -> Callable[..., Any] | None:
        """Returns preprocessing: a function from a batch, a dictionary of columns, to what the model takes; runs on
        the workers, once, or for every batch where it takes a random generator."""
    def setPreprocessing(self, value: Callable[..., Any] | None) -> Self:
        """Sets preprocessing: a function from a batch, a dictionary of columns, to what the model takes; runs on
        the workers, once, or for every batch where it takes a random generator. Returns the instance."""
    inferenceBatchSize: Param[Any]
    def getInferenceBatchSize(self) -> int | None:
        """Returns inferenceBatchSize: rows that transform and evaluate put through the model at a time; not set
        means 1024, more where rows are small, and fewer where they are large."""
    def setInferenceBatchSize(self, value: int | None) -> Self:
        """Sets inferenceBatchSize: rows that transform and evaluate put through the model at a time; not set means
        1024, more where rows are small, and fewer where they are large. Returns the instance."""
    inferenceUseGpu: Param[Any]
    def getInferenceUseGpu(self) -> bool:
        """Returns inferenceUseGpu: whether the tasks of transform, evaluate and predict ask Spark for a GPU each by
        themselves; otherwise they use what the application's tasks have."""
    def setInferenceUseGpu(self, value: bool | None) -> Self:
        """Sets inferenceUseGpu: whether the tasks of transform, evaluate and predict ask Spark for a GPU each by
        themselves; otherwise they use what the application's tasks have. Returns the instance."""
    labelCol: Param[Any]
    def getLabelCol(self) -> str | Sequence[str | Sequence[str]] | Mapping[str, str | Sequence[str]] | None:
        """Returns labelCol: label: one column (number, boolean, array of numbers, ml vector), or numeric columns
        that make one vector; for several outputs, columns by the name of the output, or a list in their order; None
        for models that train without."""
    def setLabelCol(self, value: str | Sequence[str | Sequence[str]] | Mapping[str, str | Sequence[str]] | None) -> Self:
        """Sets labelCol: label: one column (number, boolean, array of numbers, ml vector), or numeric columns that
        make one vector; for several outputs, columns by the name of the output, or a list in their order; None for
        models that train without. Returns the instance."""
    weightCol: Param[Any]
    def getWeightCol(self) -> str | Mapping[str, str] | None:
        """Returns weightCol: sample weights: a column of numbers, or of arrays with one for each token or pixel, or
        one by the name of each output; not set means 1 for every row."""
    def setWeightCol(self, value: str | Mapping[str, str] | None) -> Self:
        """Sets weightCol: sample weights: a column of numbers, or of arrays with one for each token or pixel, or
        one by the name of each output; not set means 1 for every row. Returns the instance."""


class TrainingParamTypes(Params):
    """Those of the estimator alone."""

    validationIndicatorCol: Param[Any]
    def getValidationIndicatorCol(self) -> str | None:
        """Returns validationIndicatorCol: a column of booleans, or of 0 and 1: true keeps the row for validation;
        not set means validationFraction."""
    def setValidationIndicatorCol(self, value: str | None) -> Self:
        """Sets validationIndicatorCol: a column of booleans, or of 0 and 1: true keeps the row for validation; not
        set means validationFraction. Returns the instance."""
    classWeight: Param[Any]
    def getClassWeight(self) -> Mapping[int, float] | Literal['balanced'] | None:
        """Returns classWeight: weights by class, which weigh the loss of rows in training, or 'balanced', which
        counts the labels for them; not set weighs all alike."""
    def setClassWeight(self, value: Mapping[int, float] | Literal['balanced'] | None) -> Self:
        """Sets classWeight: weights by class, which weigh the loss of rows in training, or 'balanced', which counts
        the labels for them; not set weighs all alike. Returns the instance."""
    callbacks: Param[Any]
    def getCallbacks(self) -> Sequence[keras.callbacks.Callback] | keras.callbacks.Callback:
        """Returns callbacks: Keras callbacks, or one; those that look at epochs alone and decide nothing run on the
        driver."""
    def setCallbacks(self, value: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None) -> Self:
        """Sets callbacks: Keras callbacks, or one; those that look at epochs alone and decide nothing run on the
        driver. Returns the instance."""
    driverCallbacks: Param[Any]
    def getDriverCallbacks(self) -> Sequence[keras.callbacks.Callback | FitListener] | keras.callbacks.Callback | FitListener:
        """Returns driverCallbacks: more Keras callbacks, or one, which run on the driver whatever they look at;
        listeners, elephant.FitListener."""
    def setDriverCallbacks(self, value: Sequence[keras.callbacks.Callback | FitListener] | keras.callbacks.Callback | FitListener | None) -> Self:
        """Sets driverCallbacks: more Keras callbacks, or one, which run on the driver whatever they look at;
        listeners, elephant.FitListener. Returns the instance."""
    eventsPath: Param[Any]
    def getEventsPath(self) -> str | os.PathLike[str] | None:
        """Returns eventsPath: a folder, on any file system that Spark or fsspec reaches, for a file of each fit's
        events, and with spark.elephant.trace its trace; not set writes none."""
    def setEventsPath(self, value: str | os.PathLike[str] | None) -> Self:
        """Sets eventsPath: a folder, on any file system that Spark or fsspec reaches, for a file of each fit's
        events, and with spark.elephant.trace its trace; not set writes none. Returns the instance."""
    augmentation: Param[Any]
    def getAugmentation(self) -> Callable[..., Any] | None:
        """Returns augmentation: a function from a batch and a random generator to a batch, for every training batch
        of every epoch."""
    def setAugmentation(self, value: Callable[..., Any] | None) -> Self:
        """Sets augmentation: a function from a batch and a random generator to a batch, for every training batch of
        every epoch. Returns the instance."""
    mode: Param[Any]
    def getMode(self) -> Literal['synchronous', 'sync', 'asynchronous', 'async', 'hogwild', 'gossip']:
        """Returns mode: how workers train together: 'synchronous' ('sync'), with a parameter server 'asynchronous'
        ('async') or 'hogwild' (asynchronous without locks), or in pairs without a server: 'gossip'."""
    def setMode(self, value: Literal['synchronous', 'sync', 'asynchronous', 'async', 'hogwild', 'gossip'] | None) -> Self:
        """Sets mode: how workers train together: 'synchronous' ('sync'), with a parameter server 'asynchronous'
        ('async') or 'hogwild' (asynchronous without locks), or in pairs without a server: 'gossip'. Returns the
        instance."""
    aggregation: Param[Any]
    def getAggregation(self) -> Literal['allreduce', 'server']:
        """Returns aggregation: synchronous mode: where gradients are averaged: 'allreduce' among the workers, or
        'server' at parameter servers, where a lost worker is started again while the others wait."""
    def setAggregation(self, value: Literal['allreduce', 'server'] | None) -> Self:
        """Sets aggregation: synchronous mode: where gradients are averaged: 'allreduce' among the workers, or
        'server' at parameter servers, where a lost worker is started again while the others wait. Returns the
        instance."""
    numWorkers: Param[Any]
    def getNumWorkers(self) -> int | tuple[int, int]:
        """Returns numWorkers: workers, each one Spark task (>= 1); of a barrier stage in synchronous mode; a pair
        such as (2, 8) is the fewest and the most of an elastic fit, which goes on with the task slots that there
        are."""
    def setNumWorkers(self, value: int | tuple[int, int] | None) -> Self:
        """Sets numWorkers: workers, each one Spark task (>= 1); of a barrier stage in synchronous mode; a pair such
        as (2, 8) is the fewest and the most of an elastic fit, which goes on with the task slots that there are.
        Returns the instance."""
    epochs: Param[Any]
    def getEpochs(self) -> int:
        """Returns epochs: passes over the training rows (>= 1)."""
    def setEpochs(self, value: int | None) -> Self:
        """Sets epochs: passes over the training rows (>= 1). Returns the instance."""
    batchSize: Param[Any]
    def getBatchSize(self) -> int:
        """Returns batchSize: rows per worker and step (>= 1): a synchronous step trains on numWorkers times as
        many."""
    def setBatchSize(self, value: int | None) -> Self:
        """Sets batchSize: rows per worker and step (>= 1): a synchronous step trains on numWorkers times as many.
        Returns the instance."""
    validationFraction: Param[Any]
    def getValidationFraction(self) -> float:
        """Returns validationFraction: share of the rows kept for validation, in [0, 1)."""
    def setValidationFraction(self, value: float | None) -> Self:
        """Sets validationFraction: share of the rows kept for validation, in [0, 1). Returns the instance."""
    shuffle: Param[Any]
    def getShuffle(self) -> bool:
        """Returns shuffle: whether each worker draws its rows in a new order every epoch."""
    def setShuffle(self, value: bool | None) -> Self:
        """Sets shuffle: whether each worker draws its rows in a new order every epoch. Returns the instance."""
    seed: Param[Any]
    def getSeed(self) -> int:
        """Returns seed: source of the row order, the validation split and the workers' random state."""
    def setSeed(self, value: int | None) -> Self:
        """Sets seed: source of the row order, the validation split and the workers' random state. Returns the
        instance."""
    learningRate: Param[Any]
    def getLearningRate(self) -> float | None:
        """Returns learningRate: replaces the learning rate that the model was compiled with; not set keeps it."""
    def setLearningRate(self, value: float | None) -> Self:
        """Sets learningRate: replaces the learning rate that the model was compiled with; not set keeps it. Returns
        the instance."""
    scaleLearningRate: Param[Any]
    def getScaleLearningRate(self) -> bool:
        """Returns scaleLearningRate: whether to multiply the learning rate by numWorkers, as larger global batches
        may want."""
    def setScaleLearningRate(self, value: bool | None) -> Self:
        """Sets scaleLearningRate: whether to multiply the learning rate by numWorkers, as larger global batches may
        want. Returns the instance."""
    frequency: Param[Any]
    def getFrequency(self) -> Literal['batch', 'epoch'] | int:
        """Returns frequency: 'batch' exchanges gradients each step; an integer k or 'epoch' exchanges weights,
        every k steps or each epoch."""
    def setFrequency(self, value: Literal['batch', 'epoch'] | int | None) -> Self:
        """Sets frequency: 'batch' exchanges gradients each step; an integer k or 'epoch' exchanges weights, every k
        steps or each epoch. Returns the instance."""
    compression: Param[Any]
    def getCompression(self) -> Literal['bfloat16', 'float16', 'int8', 'topk', 'powersgd'] | str | None:
        """Returns compression: how gradients are encoded where they cross hosts: 'bfloat16', 'float16', 'int8',
        'topk', 'powersgd'; not set sends them as they are."""
    def setCompression(self, value: Literal['bfloat16', 'float16', 'int8', 'topk', 'powersgd'] | str | None) -> Self:
        """Sets compression: how gradients are encoded where they cross hosts: 'bfloat16', 'float16', 'int8',
        'topk', 'powersgd'; not set sends them as they are. Returns the instance."""
    syncBatchNorm: Param[Any]
    def getSyncBatchNorm(self) -> bool:
        """Returns syncBatchNorm: whether batch normalization uses the statistics of all workers' rows."""
    def setSyncBatchNorm(self, value: bool | None) -> Self:
        """Sets syncBatchNorm: whether batch normalization uses the statistics of all workers' rows. Returns the
        instance."""
    shardOptimizer: Param[Any]
    def getShardOptimizer(self) -> bool:
        """Returns shardOptimizer: whether each worker keeps the optimizer's state of a part of the weights alone
        (ZeRO, stage 1): less memory, for half as many bytes more in each step, and the same results."""
    def setShardOptimizer(self, value: bool | None) -> Self:
        """Sets shardOptimizer: whether each worker keeps the optimizer's state of a part of the weights alone
        (ZeRO, stage 1): less memory, for half as many bytes more in each step, and the same results. Returns the
        instance."""
    allowBatchCoupledLoss: Param[Any]
    def getAllowBatchCoupledLoss(self) -> bool:
        """Returns allowBatchCoupledLoss: whether a loss may couple the rows of a batch; each worker computes it on
        its own rows."""
    def setAllowBatchCoupledLoss(self, value: bool | None) -> Self:
        """Sets allowBatchCoupledLoss: whether a loss may couple the rows of a batch; each worker computes it on its
        own rows. Returns the instance."""
    cache: Param[Any]
    def getCache(self) -> Literal['disk', 'memory']:
        """Returns cache: where a worker keeps its rows: 'disk', memory-mapped, or 'memory'."""
    def setCache(self, value: Literal['disk', 'memory'] | None) -> Self:
        """Sets cache: where a worker keeps its rows: 'disk', memory-mapped, or 'memory'. Returns the instance."""
    stepsPerEpoch: Param[Any]
    def getStepsPerEpoch(self) -> int | None:
        """Returns stepsPerEpoch: steps of an epoch (>= 1), which goes on in the rows where the last one ended; not
        set means all rows."""
    def setStepsPerEpoch(self, value: int | None) -> Self:
        """Sets stepsPerEpoch: steps of an epoch (>= 1), which goes on in the rows where the last one ended; not set
        means all rows. Returns the instance."""
    bucketByLength: Param[Any]
    def getBucketByLength(self) -> bool:
        """Returns bucketByLength: whether batches are made of sequences of like length, so that little is
        padded."""
    def setBucketByLength(self, value: bool | None) -> Self:
        """Sets bucketByLength: whether batches are made of sequences of like length, so that little is padded.
        Returns the instance."""
    useGpu: Param[Any]
    def getUseGpu(self) -> bool | Literal['auto']:
        """Returns useGpu: True demands GPUs, False hides them, 'auto' takes those that there are."""
    def setUseGpu(self, value: bool | Literal['auto'] | None) -> Self:
        """Sets useGpu: True demands GPUs, False hides them, 'auto' takes those that there are. Returns the
        instance."""
    gpusPerWorker: Param[Any]
    def getGpusPerWorker(self) -> int:
        """Returns gpusPerWorker: GPUs of each worker (>= 1), each of which is one rank; the worker's rows and
        batches are divided."""
    def setGpusPerWorker(self, value: int | None) -> Self:
        """Sets gpusPerWorker: GPUs of each worker (>= 1), each of which is one rank; the worker's rows and batches
        are divided. Returns the instance."""
    gpuTransport: Param[Any]
    def getGpuTransport(self) -> Literal['auto', 'host', 'nccl']:
        """Returns gpuTransport: how GPUs reduce gradients: 'host', or on PyTorch and JAX 'nccl'; 'auto' takes nccl
        on PyTorch where all workers share a host."""
    def setGpuTransport(self, value: Literal['auto', 'host', 'nccl'] | None) -> Self:
        """Sets gpuTransport: how GPUs reduce gradients: 'host', or on PyTorch and JAX 'nccl'; 'auto' takes nccl on
        PyTorch where all workers share a host. Returns the instance."""
    distribution: Param[Any]
    def getDistribution(self) -> keras.distribution.ModelParallel | keras.distribution.LayoutMap | None:
        """Returns distribution: on JAX: keras.distribution.ModelParallel, or a LayoutMap, by which Keras divides
        the layers among the workers; not set gives each worker the whole model."""
    def setDistribution(self, value: keras.distribution.ModelParallel | keras.distribution.LayoutMap | None) -> Self:
        """Sets distribution: on JAX: keras.distribution.ModelParallel, or a LayoutMap, by which Keras divides the
        layers among the workers; not set gives each worker the whole model. Returns the instance."""
    pipelineStages: Param[Any]
    def getPipelineStages(self) -> int | Sequence[str] | None:
        """Returns pipelineStages: parts of the model, one after the other, each on workers of its own: a number, or
        the layers with which the second and later ones begin; not set gives each worker the whole model."""
    def setPipelineStages(self, value: int | Sequence[str] | None) -> Self:
        """Sets pipelineStages: parts of the model, one after the other, each on workers of its own: a number, or
        the layers with which the second and later ones begin; not set gives each worker the whole model. Returns
        the instance."""
    microBatches: Param[Any]
    def getMicroBatches(self) -> int:
        """Returns microBatches: parts of a batch that follow one another through the stages of pipelineStages (>=
        1)."""
    def setMicroBatches(self, value: int | None) -> Self:
        """Sets microBatches: parts of a batch that follow one another through the stages of pipelineStages (>= 1).
        Returns the instance."""
    mixedPrecision: Param[Any]
    def getMixedPrecision(self) -> bool:
        """Returns mixedPrecision: whether workers compute in 16 bits where the model's layers leave that open."""
    def setMixedPrecision(self, value: bool | None) -> Self:
        """Sets mixedPrecision: whether workers compute in 16 bits where the model's layers leave that open. Returns
        the instance."""
    checkpointPath: Param[Any]
    def getCheckpointPath(self) -> str | os.PathLike[str] | None:
        """Returns checkpointPath: a folder, on any file system that Spark or fsspec reaches, for checkpoints; not
        set makes none."""
    def setCheckpointPath(self, value: str | os.PathLike[str] | None) -> Self:
        """Sets checkpointPath: a folder, on any file system that Spark or fsspec reaches, for checkpoints; not set
        makes none. Returns the instance."""
    checkpointEpochs: Param[Any]
    def getCheckpointEpochs(self) -> int:
        """Returns checkpointEpochs: epochs between two checkpoints (>= 1)."""
    def setCheckpointEpochs(self, value: int | None) -> Self:
        """Sets checkpointEpochs: epochs between two checkpoints (>= 1). Returns the instance."""
    checkpointSeconds: Param[Any]
    def getCheckpointSeconds(self) -> float | None:
        """Returns checkpointSeconds: seconds between two checkpoints, wherever in an epoch they fall; not set: at
        ends of epochs alone."""
    def setCheckpointSeconds(self, value: float | None) -> Self:
        """Sets checkpointSeconds: seconds between two checkpoints, wherever in an epoch they fall; not set: at ends
        of epochs alone. Returns the instance."""
    keepBest: Param[Any]
    def getKeepBest(self) -> str | None:
        """Returns keepBest: a metric, as the history has it: the checkpoint of the best epoch by it is kept beside
        the last two; 'val_auc:max' or 'val_cost:min' says which way is better where the name does not."""
    def setKeepBest(self, value: str | None) -> Self:
        """Sets keepBest: a metric, as the history has it: the checkpoint of the best epoch by it is kept beside the
        last two; 'val_auc:max' or 'val_cost:min' says which way is better where the name does not. Returns the
        instance."""
    resume: Param[Any]
    def getResume(self) -> bool:
        """Returns resume: whether to go on from the last checkpoint in checkpointPath, where there is one."""
    def setResume(self, value: bool | None) -> Self:
        """Sets resume: whether to go on from the last checkpoint in checkpointPath, where there is one. Returns the
        instance."""
    maxRestarts: Param[Any]
    def getMaxRestarts(self) -> int:
        """Returns maxRestarts: how often a fit goes on after it has lost a worker, from its last state (>= 0); with
        a pair of numWorkers, 0 means as long as it comes further."""
    def setMaxRestarts(self, value: int | None) -> Self:
        """Sets maxRestarts: how often a fit goes on after it has lost a worker, from its last state (>= 0); with a
        pair of numWorkers, 0 means as long as it comes further. Returns the instance."""
    timeouts: Param[Any]
    def getTimeouts(self) -> Timeouts | Mapping[str, float] | None:
        """Returns timeouts: how long waits may last: elephant.config.Timeouts, or seconds by its names; not set:
        its defaults."""
    def setTimeouts(self, value: Timeouts | Mapping[str, float] | None) -> Self:
        """Sets timeouts: how long waits may last: elephant.config.Timeouts, or seconds by its names; not set: its
        defaults. Returns the instance."""
    encryption: Param[Any]
    def getEncryption(self) -> bool | None:
        """Returns encryption: whether all connections of the fit are encrypted, by TLS 1.3 with a key pair of its
        own; not set: where Spark is told to encrypt."""
    def setEncryption(self, value: bool | None) -> Self:
        """Sets encryption: whether all connections of the fit are encrypted, by TLS 1.3 with a key pair of its own;
        not set: where Spark is told to encrypt. Returns the instance."""
    ports: Param[Any]
    def getPorts(self) -> tuple[int, int] | str | None:
        """Returns ports: the first and the last port that the driver and workers may listen on, for firewalls; not
        set: as spark.elephant.ports says, or any."""
    def setPorts(self, value: tuple[int, int] | str | None) -> Self:
        """Sets ports: the first and the last port that the driver and workers may listen on, for firewalls; not
        set: as spark.elephant.ports says, or any. Returns the instance."""
    verbose: Param[Any]
    def getVerbose(self) -> int | Literal['auto']:
        """Returns verbose: 0 silent, 1 or 'auto' plan, a live line of progress and a table of epochs, 2 without the
        live line."""
    def setVerbose(self, value: int | Literal['auto'] | None) -> Self:
        """Sets verbose: 0 silent, 1 or 'auto' plan, a live line of progress and a table of epochs, 2 without the
        live line. Returns the instance."""
    algorithm: Param[Any]
    def getAlgorithm(self) -> Literal['downpour', 'adag', 'dynsgd', 'aeasgd', 'eamsgd', 'sum', 'adpsgd', 'sgp'] | str:
        """Returns algorithm: asynchronous modes: what workers push: 'downpour', 'adag', 'dynsgd', 'aeasgd',
        'eamsgd' or 'sum'; 'aeasgd' and 'eamsgd' may name their moving rate, as in 'aeasgd:0.3', which is else 0.9 /
        numWorkers; gossip: 'adpsgd' or 'sgp', of which the first is the default there."""
    def setAlgorithm(self, value: Literal['downpour', 'adag', 'dynsgd', 'aeasgd', 'eamsgd', 'sum', 'adpsgd', 'sgp'] | str | None) -> Self:
        """Sets algorithm: asynchronous modes: what workers push: 'downpour', 'adag', 'dynsgd', 'aeasgd', 'eamsgd'
        or 'sum'; 'aeasgd' and 'eamsgd' may name their moving rate, as in 'aeasgd:0.3', which is else 0.9 /
        numWorkers; gossip: 'adpsgd' or 'sgp', of which the first is the default there. Returns the instance."""
    maxStaleness: Param[Any]
    def getMaxStaleness(self) -> int | None:
        """Returns maxStaleness: asynchronous modes: steps that a worker may be ahead of the slowest live one (>=
        0); not set means no limit."""
    def setMaxStaleness(self, value: int | None) -> Self:
        """Sets maxStaleness: asynchronous modes: steps that a worker may be ahead of the slowest live one (>= 0);
        not set means no limit. Returns the instance."""
    backgroundExchange: Param[Any]
    def getBackgroundExchange(self) -> bool:
        """Returns backgroundExchange: asynchronous modes: whether a worker computes a step while the exchange of
        the last one goes on."""
    def setBackgroundExchange(self, value: bool | None) -> Self:
        """Sets backgroundExchange: asynchronous modes: whether a worker computes a step while the exchange of the
        last one goes on. Returns the instance."""
    parameterServers: Param[Any]
    def getParameterServers(self) -> int:
        """Returns parameterServers: parameter servers: processes that the weights are divided over (>= 1)."""
    def setParameterServers(self, value: int | None) -> Self:
        """Sets parameterServers: parameter servers: processes that the weights are divided over (>= 1). Returns the
        instance."""
    serverPlacement: Param[Any]
    def getServerPlacement(self) -> Literal['driver', 'executors']:
        """Returns serverPlacement: parameter servers: where they run: 'driver' or 'executors'."""
    def setServerPlacement(self, value: Literal['driver', 'executors'] | None) -> Self:
        """Sets serverPlacement: parameter servers: where they run: 'driver' or 'executors'. Returns the
        instance."""
    port: Param[Any]
    def getPort(self) -> int:
        """Returns port: parameter servers: the first one's port, others take the next ones; 0 takes free ones."""
    def setPort(self, value: int | None) -> Self:
        """Sets port: parameter servers: the first one's port, others take the next ones; 0 takes free ones. Returns
        the instance."""
    snapshotSeconds: Param[Any]
    def getSnapshotSeconds(self) -> float:
        """Returns snapshotSeconds: parameter servers: seconds between two snapshots, from which a lost server comes
        back; 0 makes none by time."""
    def setSnapshotSeconds(self, value: float | None) -> Self:
        """Sets snapshotSeconds: parameter servers: seconds between two snapshots, from which a lost server comes
        back; 0 makes none by time. Returns the instance."""
