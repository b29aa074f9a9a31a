"""Model flavors of our own, as torchtitan config functions (``[base] config`` in TOML)."""

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw, register_moe_load_balancing_hook
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from torchtitan_ext import corpus
from torchtitan_ext.private import (
    QWEN3_EMBEDDING_INIT,
    QWEN3_LINEAR_INIT,
    build_qwen3_moe_layers,
    qwen3_norm,
)


def qwen3_moe(
    *,
    flavor: str,
    n_layers: int,
    dim: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    moe_hidden_dim: int,
    num_experts: int,
    top_k: int,
    vocab_size: int = corpus.VOCAB_SIZE,
    max_seq_len: int = 4096,
) -> ModelSpec:
    """A model of torchtitan's qwen3 MoE family of any size. Every layer is an MoE layer."""
    return ModelSpec(
        name="qwen3",
        flavor=flavor,
        model=Qwen3Model.Config(
            vocab_size=vocab_size,
            dim=dim,
            norm=qwen3_norm(dim),
            tok_embeddings=Embedding.Config(
                num_embeddings=vocab_size, embedding_dim=dim, param_init=QWEN3_EMBEDDING_INIT
            ),
            lm_head=Linear.Config(
                in_features=dim, out_features=vocab_size, param_init=QWEN3_LINEAR_INIT
            ),
            layers=build_qwen3_moe_layers(
                n_layers=n_layers,
                dim=dim,
                n_heads=n_heads,
                n_kv_heads=n_kv_heads,
                head_dim=head_dim,
                moe_hidden_dim=moe_hidden_dim,
                num_experts=num_experts,
                top_k=top_k,
                attn_backend="flex",
                moe_comm_backend="standard",
                rope=CosSinRoPE.Config(dim=head_dim, max_seq_len=max_seq_len, theta=1000000.0),
            ),
        ),
        parallelize_fn=parallelize_qwen3,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=register_moe_load_balancing_hook,
        state_dict_adapter=Qwen3StateDictAdapter,
    )


def demo() -> Trainer.Config:
    """An MoE of 6 million parameters, three quarters of them in 3 x 16 experts, on the corpus.

    It is so small that activations need no checkpointing. The rest of the job is left to TOML.
    """
    return _on_corpus(
        qwen3_moe(
            flavor="demo",
            n_layers=3,
            dim=256,
            n_heads=4,
            n_kv_heads=2,
            head_dim=32,
            moe_hidden_dim=128,
            num_experts=16,
            top_k=2,
        )
    )


def links() -> Trainer.Config:
    """An MoE of 25 million parameters in few groups: 2 layers of 10.7 million each."""
    return _on_corpus(
        qwen3_moe(
            flavor="links",
            n_layers=2,
            dim=512,
            n_heads=8,
            n_kv_heads=4,
            head_dim=64,
            moe_hidden_dim=400,
            num_experts=16,
            top_k=2,
        )
    )


def experts_top2() -> Trainer.Config:
    """As ``experts``, with 2 experts a token."""
    return _experts(2)


def experts() -> Trainer.Config:
    """An MoE for studies of routing: 4 layers of 32 small experts, top-4, 5 million parameters."""
    return _experts(4)


def experts_top8() -> Trainer.Config:
    """As ``experts``, with 8 experts a token."""
    return _experts(8)


def _experts(top_k: int) -> Trainer.Config:
    return _on_corpus(
        qwen3_moe(
            flavor=f"experts-top{top_k}",
            n_layers=4,
            dim=128,
            n_heads=4,
            n_kv_heads=2,
            head_dim=32,
            moe_hidden_dim=64,
            num_experts=32,
            top_k=top_k,
        )
    )


def _on_corpus(model_spec: ModelSpec) -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_spec,
        hf_assets_path="data/corpus",
        dataloader=HuggingFaceTextDataLoader.Config(
            dataset="narrowcast_corpus", dataset_path="data/corpus"
        ),
        loss=CrossEntropyLoss.Config(global_vocab_size=corpus.VOCAB_SIZE),
        optimizer=default_adamw(lr=1e-4),
        metrics=MetricsProcessor.Config(log_freq=1),
        activation_checkpoint=None,
    )
