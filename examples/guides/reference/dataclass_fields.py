"""An extension of griffe for the API pages: types and defaults of dataclass fields that it does not find by itself."""

import ast

import griffe


class DataclassFields(griffe.Extension):
    """transformers makes configurations dataclasses without a decorator, and describes training arguments by metadata."""

    def on_class_instance(self, *, cls: griffe.Class, **kwargs) -> None:
        if any(decorator.callable_path == "huggingface_hub.dataclasses.strict" for decorator in cls.decorators):
            dataclass = griffe.ExprName("dataclasses.dataclass")
            cls.decorators.append(griffe.Decorator(dataclass, lineno=None, endlineno=None))

    def on_package(self, *, pkg: griffe.Module, **kwargs) -> None:
        """Adds the fields of training arguments, with the help that the command line prints, to the docstrings of their classes."""
        for module in pkg["training"].modules.values():
            for cls in module.classes.values():
                fields = [
                    x for base in (*reversed(cls.mro()), cls) for x in base.attributes.values() if x.annotation and x.value
                ]
                arguments = [_describe(field) for field in fields if "metadata" in str(field.value)]
                if arguments and cls.docstring:
                    cls.docstring.parsed.insert(1, griffe.DocstringSectionParameters(arguments))


def _describe(field: griffe.Attribute) -> griffe.DocstringParameter:
    options = {option.arg: option.value for option in ast.parse(str(field.value), mode="eval").body.keywords}
    description = ast.literal_eval(options["metadata"])["help"]
    return griffe.DocstringParameter(
        field.name, annotation=field.annotation, value=ast.unparse(options["default"]), description=description
    )
