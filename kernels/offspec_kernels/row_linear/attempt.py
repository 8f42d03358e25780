"""Call of a C++ function that may throw: under ctypes and in numba's loops an exception ends the process."""

import ctypes

from llvmlite import binding  # type: ignore[import-untyped]

_RUNTIME = ("__gxx_personality_v0", "__cxa_begin_catch", "__cxa_end_catch")
_CALLER = """
declare i32 @__gxx_personality_v0(...)
declare i8* @__cxa_begin_catch(i8*)
declare void @__cxa_end_catch()

define i1 @attempt(i64 %address, {parameters}) personality i32 (...)* @__gxx_personality_v0 {{
  %function = inttoptr i64 %address to void ({types})*
  invoke void %function({parameters}) to label %returned unwind label %thrown
returned:
  ret i1 true
thrown:
  %found = landingpad {{ i8*, i32 }} catch i8* null
  %exception = extractvalue {{ i8*, i32 }} %found, 0
  call i8* @__cxa_begin_catch(i8* %exception)
  call void @__cxa_end_catch()
  ret i1 false
}}
"""


def attempt(address: int, *words: int) -> bool:
    """Call a function. Return False if it threw.

    Raises OSError or AttributeError if this system does not have GNU's C++ library.

    Args:
        address: Of the function, which returns nothing.
        words: Its integers and pointers.
    """
    library = ctypes.CDLL("libstdc++.so.6")
    for name in _RUNTIME:
        binding.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    parameters = ", ".join(f"i64 %word{place}" for place in range(len(words)))
    code = _CALLER.format(parameters=parameters, types=", ".join(["i64"] * len(words)))
    machine = binding.Target.from_default_triple().create_target_machine()
    with binding.create_mcjit_compiler(binding.parse_assembly(code), machine) as engine:
        engine.finalize_object()
        call = ctypes.CFUNCTYPE(ctypes.c_bool, *[ctypes.c_int64] * (len(words) + 1))
        return bool(call(engine.get_function_address("attempt"))(address, *words))
