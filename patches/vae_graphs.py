"""A video autoencoder's loop over frames and tiles is one graph, which grows with the clip and is compiled anew for
every length and size."""

from .patch import Patch
from .transformer_graphs import cut_out

AUTOENCODERS = "diffusers.models.autoencoders.autoencoder_kl"

PATCH = Patch(
    name="vae_graphs",
    what="decoding compiles one graph of all latent frames and tiles, which takes the longer the longer the clip is; "
    "cut around the coder, frames and tiles of one shape share theirs",
    upstream="https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/autoencoders/"
    "autoencoder_kl_wan.py#L1200",
    versions={"diffusers": ">=0.41,<0.43", "torch_xla": "==2.9.*"},
    delete_when="diffusers' autoencoders end a graph after every chunk of frames",
    targets=(
        (f"{AUTOENCODERS}_allegro", "AllegroDecoder3D.forward"),
        (f"{AUTOENCODERS}_cogvideox", "CogVideoXDecoder3D.forward"),
        (f"{AUTOENCODERS}_cogvideox", "CogVideoXEncoder3D.forward"),
        (f"{AUTOENCODERS}_hunyuan_video", "HunyuanVideoDecoder3D.forward"),
        (f"{AUTOENCODERS}_hunyuanvideo15", "HunyuanVideo15Decoder3D.forward"),
        (f"{AUTOENCODERS}_ltx", "LTXVideoDecoder3d.forward"),
        (f"{AUTOENCODERS}_magvit", "EasyAnimateDecoder.forward"),
        (f"{AUTOENCODERS}_mochi", "MochiDecoder3D.forward"),
        (f"{AUTOENCODERS}_wan", "WanDecoder3d.forward"),
        (f"{AUTOENCODERS}_wan", "WanEncoder3d.forward"),
    ),
    wrap=cut_out,
)
