"""`port` is never silent: each token of a function is translated, or listed with its line."""

import re

import pytest
import tree_sitter
import tree_sitter_cuda

from cupyops._port.expressions import EXPRESSIONS
from cupyops._port.port import port
from cupyops._port.program import parser, walk
from cupyops._port.scope import leaves
from cupyops._port.statements import STATEMENTS

HEAD = "__global__ void k(float* x, int n) {}\n__global__ void m(const float* x, float* y, float by, int n) {}\n"
HELPER = "int helper(int a, int b = 4) { return a + b; }\n"
RUN = HEAD + HELPER + "void run(at::Tensor x, at::Tensor y, int n, float s, bool fast) {\n%s\n}\n"
LAUNCH = "k<<<1, 2>>>(x.data_ptr<float>(), n);"


def words(text):
    return text.split()


# what is read by the node around it
PARTS = words(
    """
    abstract_array_declarator abstract_pointer_declarator abstract_reference_declarator argument_list array_declarator auto
    case_statement character comma_expression condition_clause else_clause
    escape_sequence field_identifier init_declarator kernel_call_syntax lambda_capture_specifier lambda_default_capture
    namespace_identifier nested_namespace_specifier parameter_declaration parameter_list placeholder_type_specifier
    pointer_declarator primitive_type raw_string_content raw_string_delimiter reference_declarator sized_type_specifier
    storage_class_specifier string_content structured_binding_declarator subscript_argument_list template_argument_list
    template_function template_method template_type type_descriptor type_identifier type_qualifier dependent_name
    dependent_type optional_parameter_declaration function_declarator parenthesized_declarator pointer_type_declarator
    lambda_declarator trailing_return_type
    """
)
# what stands outside of functions, or takes the form of one of the preprocessor's lines, which are gone by then
OUTSIDE = words(
    """
    annotation base_class_clause bitfield_clause concept_definition constraint_conjunction constraint_disjunction
    consteval_block_declaration declaration_list default_method_clause delete_method_clause destructor_name enumerator
    enumerator_list enum_specifier explicit_function_specifier explicit_object_parameter_declaration export_declaration
    field_declaration field_declaration_list field_initializer field_initializer_list friend_declaration function_definition
    global_module_fragment_declaration import_declaration linkage_specification module_declaration module_name
    module_partition namespace_definition noexcept operator_cast operator_name optional_type_parameter_declaration
    parameter_pack_expansion preproc_arg preproc_call preproc_def preproc_defined preproc_directive preproc_elif
    preproc_elifdef preproc_else preproc_function_def preproc_if preproc_ifdef preproc_include preproc_params
    private_module_fragment_declaration pure_virtual_clause ref_qualifier requirement_seq requires_clause simple_requirement
    compound_requirement type_requirement system_lib_string template_declaration template_instantiation
    template_parameter_list template_template_parameter_declaration throw_specifier translation_unit
    type_parameter_declaration variadic_declarator variadic_parameter_declaration variadic_type_parameter_declaration
    virtual_specifier access_specifier ms_based_modifier ms_call_modifier ms_declspec_modifier ms_pointer_modifier
    ms_restrict_modifier ms_signed_ptr_modifier ms_unaligned_ptr_modifier ms_unsigned_ptr_modifier class_specifier
    union_specifier splice_expression splice_specifier splice_type_specifier reflect_expression launch_bounds
    """
)
# what has no translation: one of each
REFUSED = {
    "abstract_function_declarator": "auto f = (int (*)(int))n;",
    "abstract_parenthesized_declarator": "auto f = (int (*)(int))n;",
    "alignas_qualifier": "alignas(16) int a = 3;",
    "alignof_expression": "n = alignof(int);",
    "attribute": "[[maybe_unused]] int a = 3;",
    "attribute_declaration": "[[maybe_unused]] int a = 3;",
    "attribute_specifier": "int a __attribute__((unused)) = 3;",
    "attributed_declarator": "int a [[maybe_unused]] = 3;",
    "attributed_statement": "[[likely]] n = 3;",
    "catch_clause": "try { n = 3; } catch (...) { n = 4; }",
    "co_await_expression": "co_await n;",
    "co_return_statement": "co_return n;",
    "co_yield_statement": "co_yield n;",
    "decltype": "decltype(n) a = 3;",
    "delete_expression": "delete x;",
    "expansion_statement": "template for (int i = 0; i < n; ++i) { n += 1; }",
    "extension_expression": "n = __extension__ 3;",
    "field_designator": "Params p = {.n = 3};",
    "fold_expression": "n = (n + ... + 3);",
    "for_range_loop": "for (int i : n) { n += i; }",
    "generic_expression": "n = _Generic(n, int: 3);",
    "gnu_asm_clobber_list": 'asm volatile("nop" : "=r"(n) : "r"(n) : "memory");',
    "gnu_asm_expression": 'asm("nop");',
    "gnu_asm_goto_list": 'asm goto("nop" : : : : done);',
    "gnu_asm_input_operand": 'asm volatile("nop" : "=r"(n) : "r"(n) : "memory");',
    "gnu_asm_input_operand_list": 'asm volatile("nop" : "=r"(n) : "r"(n) : "memory");',
    "gnu_asm_output_operand": 'asm volatile("nop" : "=r"(n) : "r"(n) : "memory");',
    "gnu_asm_output_operand_list": 'asm volatile("nop" : "=r"(n) : "r"(n) : "memory");',
    "gnu_asm_qualifier": 'asm volatile("nop");',
    "goto_statement": "goto done;",
    "init_statement": "if (int a = 3; a > n) n = 4;",
    "initializer_pair": "Params p = {.n = 3};",
    "labeled_statement": "done: n = 3;",
    "lambda_capture_initializer": "auto f = [a = 3] { return a; };",
    "lambda_specifier": "auto f = []() mutable { return 3; };",
    "literal_suffix": "n = 3_km;",
    "namespace_alias_definition": "namespace short_name = at;",
    "new_declarator": "auto p = new int[3]();",
    "new_expression": "auto p = new int;",
    "offsetof_expression": "n = offsetof(Params, n);",
    "requires_expression": "n = requires { n + 1; };",
    "seh_except_clause": "__try { n = 3; } __except (1) { n = 4; }",
    "seh_finally_clause": "__try { n = 3; } __finally { n = 4; }",
    "seh_leave_statement": "__leave;",
    "seh_try_statement": "__try { n = 3; } __finally { n = 4; }",
    "statement_identifier": "goto done;",
    "struct_specifier": "struct { int a; } p;",
    "subscript_designator": "int a[3] = {[1] = 3};",
    "subscript_range_designator": "int a[3] = {[0 ... 1] = 3};",
    "this": "n = this->size;",
    "try_statement": "try { n = 3; } catch (...) { n = 4; }",
    "user_defined_literal": "n = 3_km;",
}


def ported(tmp_path, body):
    path = tmp_path / "x.cu"
    path.write_text(RUN % body)
    return port([path], "x.cu")


def test_every_type_of_node_has_a_place():
    """Of the grammar as it is installed: a type that is new is none that is passed over."""
    language = tree_sitter.Language(tree_sitter_cuda.language())
    kinds = {
        language.node_kind_for_id(one)
        for one in range(language.node_kind_count)
        if language.node_kind_is_named(one) and language.node_kind_is_visible(one)
    }
    places = [
        set(EXPRESSIONS),
        set(STATEMENTS),
        set(PARTS),
        set(OUTSIDE),
        set(REFUSED) - set(EXPRESSIONS) - set(STATEMENTS),
    ]
    assert kinds - set().union(*places) == set()
    for index, one in enumerate(places):
        for other in places[index + 1 :]:
            assert not one & other


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_translation_is_listed_with_its_line(tmp_path, kind):
    code = f"{LAUNCH}\n{REFUSED[kind]}\n{LAUNCH}"
    root = parser().parse((RUN % code).encode()).root_node
    assert any(node.type == kind for node in walk(root)) or root.has_error
    found = ported(tmp_path, code)
    assert any(one.startswith("x.cu:6: not translated: ") for one in found.problems), found.problems
    assert found.files["x.py"].count("raise NotImplementedError('x.cu:6:") + found.files["x.py"].count(
        'raise NotImplementedError("x.cu:6:'
    )


# statements of which no token may be changed without a change of what is written
TOLD = [
    "const int count = x.size(0) * 3 + n / 4 - helper(n);",
    "auto z = torch::zeros({n, 3}, x.options().dtype(torch::kInt32));",
    "at::Tensor z = at::empty_like(x);",
    "if (fast && x.is_cuda()) { n = 3; } else if (!fast || n > 2) { n += 4; } else n = 5;",
    "if (!x.is_cuda()) return;",
    'TORCH_CHECK(n == 3 && x.is_cuda() && y.dim() != 2, "a message of ", n);',
    'TORCH_CHECK_EQ(n, 4, "four");',
    "for (int i = 1; i < n; i += 2) { n += i; }",
    "for (int i = 1; i < 9; ++i) { helper(i); }",
    "while (n > 3) { n -= 2; if (n == 5) break; else continue; }",
    "do { n *= 2; } while (n < 9);",
    "switch (n) { case 1: n = 2; break; case 4: case 5: n = 6; default: n = 7; }",
    "int a[2] = {1, 2}; a[1] = n; n = a[0];",
    "float f = n * 0.5f; f -= s; f = -f; n = (int)f;",
    "unsigned u = n; u <<= 3; u ^= 5u; n = ~u;",
    "dim3 grid(n, 2), block(32); grid.y = 3; m<<<grid, block, n * 4>>>(x.data_ptr<float>(), y.data_ptr<float>(), s, n);",
    "auto p = x.data_ptr<float>(); p += n; k<<<n, 64>>>(p + 3, n);",
    'AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "name", [&] { n = sizeof(scalar_t) * 2; });',
    "auto [values, indices] = torch::sort(x, 1); y = values;",
    "std::vector<at::Tensor> all = {x, y}; for (auto& one : all) { one.fill_(3); }",
    "x = x.view({n, -1}).contiguous().to(torch::kFloat64);",
    "n = fast ? helper(n, 3) : helper(2);",
    'printf("%d of %d", n, 3);',
    'if (n < 0) throw std::runtime_error("below");',
    "cudaMemsetAsync(x.data_ptr<float>(), 1, n * 4);",
    "using scalar = double; scalar d = n; n = d * 1.5;",
    "int k = n++ + 2; while (k-- > 3 && (n = k * 2) < 9) { n += 1; }",
    "auto go = [&](int k) -> int { n += k; return n * 2; }; n = go(3) + [=] { return s > 3 ? 1 : 2; }();",
    "auto z = x.index({torch::indexing::Slice(1, n), 0}).slice(0, 1, n); z.add_(3);",
    "auto counts = y.accessor<int, 2>(); counts[n][1] = 3; n = counts[0][2];",
    "int8_t c = n; n = c;",
    "static const int fixed = 3; n += fixed;",
    "std::vector<int> v(n); int* p = &v[1] + 2; p[n] = 3; p += 2; n = *p;",
    "int* p = new int[n]; p[1] = 4; n = p[2]; delete[] p;",
    "n = std::clamp(n, 2, 5);",
    'if (const char* name = std::getenv("NAME")) n = std::atoi(name); else if (n > 3) n = 5;',
    "if (int q = n / 2) { n += q; } x = at::slice(x, 1, 2, n);",
    "int total = 3; cudaMemcpy(x.data_ptr<float>(), &total, n * 4, cudaMemcpyHostToDevice);",
    "n = at::cuda::getCurrentDeviceProperties()->maxGridSize[1] - 2;",
    'auto z = AT_DISPATCH_INTEGRAL_TYPES(y.scalar_type(), "name", [&] { return x.add(3); }); z.add_(2);',
]
_SIGNS = {"+": "-", "-": "+", "*": "+", "/": "+", "<": ">", ">": "<", "==": "!=", "!=": "==", "&&": "||", "||": "&&"}
_SIGNS |= {"+=": "-=", "-=": "+=", "*=": "+=", "++": "--", "!": "", "~": "-", "<<=": ">>=", "^=": "|=", "=": "+="}


def _changed(leaf):
    """A token in the place of another; None for brackets and words whose node says what they are."""
    spelled = leaf.text.decode()
    if leaf.type in ("identifier", "field_identifier", "type_identifier", "namespace_identifier"):
        return f"{spelled}_other"
    if leaf.type == "number_literal":
        return re.sub(r"\d", lambda one: str((int(one[0]) + 1) % 10), spelled, count=1)
    if leaf.type == "string_content":
        return f"{spelled}other"
    if leaf.type == "primitive_type":
        return "bool" if spelled != "float" else None  # what a pointer points at is the launch's to check
    if leaf.parent.type in ("binary_expression", "assignment_expression", "update_expression", "unary_expression"):
        return _SIGNS.get(spelled)
    return {"break": "continue", "continue": "break"}.get(spelled)


@pytest.mark.parametrize("body", TOLD)
def test_each_token_has_a_meaning(tmp_path, body):
    """Change any token, and what is written, or what is listed, changes."""
    code = f"{body}\n{LAUNCH}".encode()
    before = ported(tmp_path, code.decode())
    assert not [one for one in before.problems if "not translated" in one]
    start = (RUN % "\0").encode().index(b"\0")
    root = parser().parse((RUN % code.decode()).encode()).root_node
    count = 0
    for leaf in leaves(root):
        at, end = leaf.start_byte - start, leaf.end_byte - start
        if not 0 <= at < len(body.encode()) or (other := _changed(leaf)) is None:
            continue
        after = ported(tmp_path, (code[:at] + other.encode() + code[end:]).decode())
        assert after.files["x.py"] != before.files["x.py"], (leaf.text, other)
        count += 1
    assert count > 2


NOTHING = [
    "AT_CUDA_CHECK(cudaGetLastError());",
    "C10_CUDA_KERNEL_LAUNCH_CHECK();",
    "cudaDeviceSynchronize();",
    'cudaError_t err = cudaGetLastError(); if (err != cudaSuccess) { printf("%s", cudaGetErrorString(err)); exit(1); }',
    "cudaError_t err; err = cudaGetLastError(); if (cudaSuccess != err) { unknown(err); }",
    "const at::cuda::OptionalCUDAGuard guard(device_of(x));",
    "at::cuda::CUDAGuard guard(x.device());",
    "at::DeviceGuard guard{x.device()};",
    "cudaStream_t stream = at::cuda::getCurrentCUDAStream(); (void)stream;",
    "auto stream = c10::cuda::getCurrentCUDAStream(x.get_device()).stream();",
    "cudaSetDevice(x.get_device());",
    "c10::cuda::MaybeSetDevice(x.get_device());",
    'TORCH_CHECK(x.is_cuda(), "on a GPU");',
    'TORCH_CHECK(x.device().is_cuda() && y.device().type() == at::kCUDA, "on a GPU");',
    'at::TensorArg a{x, "x", 1}, b{y, "y", 2}; at::checkAllSameGPU("run", {a, b});',
    "cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);",
    "if (cudaGetLastError() != cudaSuccess) return;",
    "auto pool = at::cuda::getStreamFromPool(true, x.get_device()); cudaStream_t of = pool.stream();"
    " cudaStreamSynchronize(of);",
    "cudaEvent_t e; cudaEventCreateWithFlags(&e, cudaEventDisableTiming);"
    " cudaEventRecord(e, at::cuda::getCurrentCUDAStream());"
    " cudaStreamWaitEvent(at::cuda::getDefaultCUDAStream(), e, 0); cudaEventDestroy(e);",
]
ALMOST = [
    "auto z = make_cuda_copy(x);",
    "CHECK(cudaMemcpyToSymbol(table, x.data_ptr<float>(), 4));",
    "cudaFillLauncher(x);",
    "float err = s; if (err > 0.5f) n = 3;",
    "AT_CUDA_CHECK(helper(n));",
    "cudaSetDevice(1);",
    "at::cuda::CUDAGuard guard(n);",
    "cudaFuncSetAttribute(k, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);",
    "cudaDeviceReset();",
    "cudaEventRecord(event);",
    "float ms; cudaEvent_t e; cudaEventElapsedTime(&ms, e, e);",
    "std::vector<int> v(2), w(2); int* p = &v[0]; p = &w[0]; n = *p;",
    "std::vector<int> v(2), w(2); int* p = fast ? &v[0] : &w[0];",
    "int* p = new int[2]; m<<<1, 1>>>(x.data_ptr<float>(), y.data_ptr<float>(), s, p);",
    'TORCH_CHECK(fast || x.is_cuda(), "either");',
    "cudaError_t err = cudaDeviceReset(); if (err != cudaSuccess) return;",
    'at::checkAllSameType("run", {x, y});',
    "CUDA_CHECK(launch_other(x));",
    "n = n ?: 4;",
    "int d = 3; cudaGetDevice(&d); k<<<1, 2>>>(x.data_ptr<float>(), d);",
]


@pytest.mark.parametrize("body", NOTHING)
def test_what_is_known_to_be_nothing_leaves_nothing(tmp_path, body):
    found, without = ported(tmp_path, f"{body} {LAUNCH}"), ported(tmp_path, LAUNCH)
    written = [re.sub(r"^ *# .*\n", "", one.files["x.py"], flags=re.MULTILINE) for one in (found, without)]
    assert found.problems == without.problems and written[0] == written[1]


@pytest.mark.parametrize("body", ALMOST)
def test_what_is_almost_so_is_translated_or_listed(tmp_path, body):
    found, without = ported(tmp_path, f"{body} {LAUNCH}"), ported(tmp_path, LAUNCH)
    assert found.files["x.py"] != without.files["x.py"]
    compile(found.files["x.py"], "x.py", "exec")


def test_what_a_signature_has_besides_is_listed(tmp_path):
    path = tmp_path / "x.cu"
    path.write_text(HEAD + "[[nodiscard]] static inline int two(const int a) noexcept { return a; }\n")
    path.write_text(path.read_text() + "void run(at::Tensor x) { k<<<two(1), 3>>>(x.data_ptr<float>(), 3); }\n")
    found = port([path], "x.cu")
    assert [one for one in found.problems if "left out" in one] == ["x.cu:3: check: '[[nodiscard]]' of two is left out"]


def test_a_variable_that_is_written_to_by_two_names_is_listed(tmp_path):
    path = tmp_path / "x.cu"
    both = "void both(int& a, int* b) { a = 1; *b += a; }\n"
    path.write_text(
        f"{HEAD}{both}void run(at::Tensor x) {{\nint n = 3; both(n, &n); k<<<1, n>>>(x.data_ptr<float>(), n); }}\n"
    )
    said = "x.cu:5: not translated: 'both(n, &n)': a variable that both writes to by two names"
    assert said in port([path], "x.cu").problems


SEVERAL = {
    "const int kind = 3;": ("const int kind = 4;", "n = kind;", "the name kind, which has several values"),
    "using kind = float;": ("using kind = int;", "kind y = n;", "the type ?"),
    "struct kind { int q; };": ("struct kind { char q; int r; };", "kind p; p.q = n;", "the type kind"),
}


@pytest.mark.parametrize("first", SEVERAL)
def test_a_name_that_means_several_things_is_listed(tmp_path, first):
    second, body, said = SEVERAL[first]
    path = tmp_path / "x.cu"
    path.write_text(
        f"namespace a {{ {first} }}\nnamespace b {{ {second} }} using namespace b;\n{RUN % f'{body} {LAUNCH}'}"
    )
    assert f"x.cu:7: not translated: {said}" in port([path], "x.cu").problems
