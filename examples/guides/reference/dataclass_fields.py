"""An extension of griffe for the API pages: types and defaults of dataclass fields that it does not find by itself."""

import ast

import griffe


class DataclassFields(griffe.Extension):
    """Fields of configurations, which transformers makes dataclasses without a decorator, and of training arguments."""

    def on_class_instance(self, *, cls: griffe.Class, **kwargs) -> None:
        if any(decorator.callable_path == "huggingface_hub.dataclasses.strict" for decorator in cls.decorators):
            dataclass = griffe.ExprName("dataclasses.dataclass")
            cls.decorators.append(griffe.Decorator(dataclass, lineno=None, endlineno=None))

    def on_package(self, *, pkg: griffe.Module, **kwargs) -> None:
        """Adds to the docstrings of training arguments the fields and the help that the command line prints."""
        for module in pkg["training"].modules.values():
            for cls in module.classes.values():
                fields = {name: x for base in (*reversed(cls.mro()), cls) for name, x in base.attributes.items()}
                parameters = [_make_parameter(field) for field in fields.values() if "metadata=" in str(field.value)]
                if parameters and cls.docstring:
                    cls.docstring.parsed.insert(1, griffe.DocstringSectionParameters(parameters))


def _make_parameter(field: griffe.Attribute) -> griffe.DocstringParameter:
    options = {keyword.arg: keyword.value for keyword in ast.parse(str(field.value), mode="eval").body.keywords}
    description, default = ast.literal_eval(options["metadata"])["help"], ast.unparse(options["default"])
    return griffe.DocstringParameter(field.name, annotation=field.annotation, value=default, description=description)
