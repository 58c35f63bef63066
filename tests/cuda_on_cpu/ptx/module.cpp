#include <optional>
#include <utility>

#include "ptx/ast.h"
#include "ptx/body.h"
#include "ptx/declaration.h"
#include "ptx/reader.h"

namespace cuda_on_cpu::ptx {
namespace {

class ModuleParser {
 public:
  ModuleParser(std::string_view text, const std::string& name) : reader_(text, name) {}

  Module run() {
    while (!reader_.at_end()) read_item();
    if (module_.version.empty()) reader_.fail("expected .version: is this PTX?");
    for (const auto& [index, position] : bodies_) read_function_body(index, position);
    return std::move(module_);
  }

 private:
  void read_item() {
    if (reader_.take_if(';')) return;
    if (reader_.peek().kind != Token::Kind::kDotted) reader_.fail("expected a directive");
    const std::string_view word = reader_.peek().text;
    if (word == "version" || word == "target" || word == "address_size") {
      read_header();
    } else if (word == "file") {
      read_file();
    } else if (word == "section") {
      reader_.take();
      while (!reader_.peek().is('{') && !reader_.at_end()) reader_.take();
      reader_.skip_braces();
    } else if (word == "pragma") {
      reader_.skip_statement();
    } else {
      read_definition();
    }
  }

  void read_header() {
    const Token word = reader_.take();
    const std::uint32_t line = word.line;
    const std::size_t begin = reader_.peek().begin;
    std::size_t end = begin;
    while (reader_.peek().line == line && !reader_.at_end()) end = reader_.take().end;
    const std::string value(reader_.text(begin, end));
    if (word.text == "version") module_.version = value;
    if (word.text == "target") module_.target = value.substr(0, value.find(','));
    if (word.text == "address_size" && value != "64") reader_.fail("expected .address_size 64");
  }

  void read_file() {
    const std::uint32_t line = reader_.take().line;
    const auto number = static_cast<std::uint32_t>(reader_.expect_integer("a file number"));
    if (reader_.peek().kind != Token::Kind::kString) reader_.fail("expected a file name");
    module_.files[number] = reader_.take().text;
    while (reader_.peek().line == line && !reader_.at_end()) reader_.take();
  }

  // A variable or a function, with its linkage.
  void read_definition() {
    bool external = false;
    for (;;) {
      const std::string_view word = reader_.peek().text;
      if (word != "visible" && word != "extern" && word != "weak" && word != "common") break;
      external |= word == "extern";
      reader_.take();
    }
    if (reader_.peek().is_dotted("entry") || reader_.peek().is_dotted("func")) {
      read_function();
      return;
    }
    const std::optional<Space> space = space_named(reader_.peek().text);
    if (!space || *space == Space::kRegister || *space == Space::kParameter) {
      reader_.fail("the directive is not supported");
    }
    reader_.take();
    Variable variable = read_variable(reader_, *space);
    reader_.expect(';');
    variable.external = external;
    names_.variables[variable.name] = module_.variables.size();
    module_.variables.push_back(std::move(variable));
  }

  void read_function() {
    Function function;
    function.line = reader_.peek().line;
    function.entry = reader_.take().text == "entry";
    if (reader_.take_if_dotted("attribute")) reader_.fail("a function attribute is not supported");
    function.results = read_parameters(reader_);
    function.name = reader_.expect_word("the name of a function");
    function.parameters = read_parameters(reader_);
    read_performance_directives(function);
    const auto known = names_.functions.find(function.name);
    const std::size_t index =
        known == names_.functions.end() ? module_.functions.size() : known->second;
    names_.functions[function.name] = index;
    if (reader_.peek().is('{')) {
      function.defined = true;
      bodies_.emplace_back(index, reader_.position());
      reader_.skip_braces();
    } else {
      reader_.expect(';');
    }
    if (index == module_.functions.size()) {
      module_.functions.push_back(std::move(function));
    } else if (function.defined) {
      module_.functions[index] = std::move(function);
    }
  }

  void read_performance_directives(Function& function) {
    while (reader_.peek().kind == Token::Kind::kDotted) {
      const std::string_view word = reader_.peek().text;
      if (word == "maxntid" || word == "reqntid") {
        function.exact_threads |= word == "reqntid";
        reader_.take();
        function.max_threads = read_product();
      } else if (word == "minnctapersm" || word == "maxnreg" || word == "maxnctapersm") {
        reader_.take();
        (void)reader_.expect_integer("a number");
      } else if (word == "noreturn") {
        reader_.take();
      } else if (word == "pragma") {
        reader_.skip_statement();
      } else {
        function.error = "the directive ." + std::string(word) + " is not supported";
        while (!reader_.peek().is('{') && !reader_.peek().is(';') && !reader_.at_end()) {
          reader_.take();
        }
      }
    }
  }

  int read_product() {
    std::int64_t product = reader_.expect_integer("a number of threads");
    while (reader_.take_if(',')) product *= reader_.expect_integer("a number of threads");
    return static_cast<int>(product);
  }

  void read_function_body(std::size_t index, std::size_t position) {
    Function& function = module_.functions[index];
    if (!function.error.empty()) return;
    reader_.rewind(position);
    try {
      read_body(reader_, names_, function);
    } catch (const SyntaxError& error) {
      function.error = error.what();
      function.instructions.clear();
      function.tables.clear();
    }
  }

  Reader reader_;
  Module module_;
  ModuleNames names_;
  std::vector<std::pair<std::size_t, std::size_t>> bodies_;  // function, position of its '{'
};

}  // namespace

Module parse_module(std::string_view text, const std::string& name) {
  return ModuleParser(text, name).run();
}

}  // namespace cuda_on_cpu::ptx
