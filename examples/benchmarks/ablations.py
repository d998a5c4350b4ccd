"""Three choices inside ToST, on CIFAR-10: the width of a head at equal width of the model, and the paper's two ablations.

    python examples/benchmarks/ablations.py --images CIFAR10_FOLDER

The paper leaves open how wide a head should be; here heads of 16, 32, 64 and 128 channels at a width of 128 (the last is one
head alone, whose memberships are all 1). And it reports, for ToST-S after 400 epochs on CIFAR-10, 91.2 % as published, 85.2 %
with raw scores (each channel's squares as they are, not normalised over the tokens), 87.4 % with an ISTA step in place of the
MLP, and 80.6 % with both. Here the same four at a width of 128; the first is compare_vision.py's TSSA. Same data, steps and
learning rates to choose from as there. In full size they are four commands, which differ in --config_overrides alone:

    python examples/run_image_classification.py --config_name tost-vision-small-patch16 --recipe finetune \\
        --dataset_name uoft-cs/cifar10 --do_train --do_eval --num_train_epochs 400 --output_dir my-ablation \\
        --config_overrides mlp_type=ista,normalize_scores=false

with `mlp_type=mlp,normalize_scores=true`, `mlp_type=mlp,normalize_scores=false`, `mlp_type=ista,normalize_scores=true` for the
other three. The paper does not say by which recipe its four were trained.
"""

from compare_vision import compare, make_classifier, make_parser_of_images
from experiments import Results
from rows import parse_arguments


HEAD_DIMS = (16, 32, 64, 128)
HEAD_DIM = 32  # of the ablations
ABLATIONS = {
    "raw scores": {"normalize_scores": False},
    "ISTA": {"mlp_type": "ista"},
    "raw scores, ISTA": {"normalize_scores": False, "mlp_type": "ista"},
}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser_of_images(__doc__, steps=300)
    parser.add_argument(
        "--head_dims", type=int, nargs="*", default=list(HEAD_DIMS), help="widths of heads; none with no number"
    )
    args = parse_arguments(parser, arguments, __file__)
    for head_dim in (*args.head_dims, HEAD_DIM):
        if args.width % head_dim:
            parser.error(f"a width of {args.width} cannot be split into heads of {head_dim} channels")

    def maker(head_dim, **options):
        heads = args.width // head_dim
        return lambda names, side: make_classifier(args, names, side, num_attention_heads=heads, **options)

    makers = {f"{head_dim} channels a head": maker(head_dim) for head_dim in args.head_dims}
    makers |= {f"{HEAD_DIM} channels a head, {name}": maker(HEAD_DIM, **options) for name, options in ABLATIONS.items()}
    compare(args, Results(args), "CIFAR-10", makers)


if __name__ == "__main__":
    main()
