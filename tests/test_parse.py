"Text that is not a method, and what the parser says of it; generated texts are in test_properties.py."
import pytest, sys
from fedlit.method import Method
from fedlit.parse import ParseError, classes, method, value

def test_no_module_of_python_is_searched_for_a_method():
    "Not even imported; `antigravity` would open a browser."
    assert classes(dict(Popen='subprocess:Popen', fly='antigravity:fly', x='no.such:x')) == {}
    assert 'antigravity' not in sys.modules

@pytest.mark.parametrize('text,word', [
    ("__import__('os')", "no method is called '__import__'"),
    ("__import__('os').system('ls')", 'not a method'),
    ('FedDecor()', 'did you mean FedDecorr'),
    ('MOON(tua=1)', "did you mean 'tau'"),
    *((text, 'plain value') for text in (
        'MOON(mu=open("x"))', 'HeteroFL(seed={})', 'HeteroFL(seed={1})', 'FedProx(mu=1j)', 'FedProx(mu=b"1")',
        'FedProx(mu=...)', 'FedProx(mu=-"a")')),
    ('MOON', 'parentheses'),
    ('MOON() - FedProx()', 'not a method'),
    ('', 'cannot be read'),
    ('(' * 5000, 'not read'),
    ('(' * 1500, 'cannot be read'),
    ('MOON(**{"mu": 1})', 'not understood'),
    ('lambda: 0', 'not a method'),
    ('FedAvg().parts', 'not a method'),
    ('MOON(mu=-1)', 'at least 0'),
    ('MOON(mu="a")', '.'),
    ('Sum()', 'no method'),
    ('MOON(1, 2, "released", 4)', '.')])
def test_text_that_is_not_a_method(text, word):
    with pytest.raises(ParseError, match=word): method(text)

def test_arguments_of_a_value_that_do_not_fit():
    with pytest.raises(ParseError, match=r'is written as Milestones\(lr, at, factor=0\.1\)'): value('Milestones(.1)')
    with pytest.raises(ParseError, match=r'written as RoundRobin\(share=1\.0\)'): value('RoundRobin(.1, hour=3)')

def test_a_name_that_is_there_is_taken_before_one_that_looks_like_it():
    class My_Own(Method): left: int = 1
    class MyOwn(Method): right: int = 2
    both = dict(My_Own=My_Own, MyOwn=MyOwn)
    assert [type(method(f'{k}()', both)) for k in both] == [My_Own, MyOwn]
    assert type(method('myown()', both)) in both.values()
